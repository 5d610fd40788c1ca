"""Import the data folder of an nsqd 1.3.0: its topics, channels and queued messages.

`NsqdFolder` is the folder; `import_topics` imports it. The import preserves ids, timestamps, attempts, bodies, pause
flags and the messages of each channel. It does not change nsqd's folder.
"""
