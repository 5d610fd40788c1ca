"""Reading with the data source `nsq`: the logs of topics as rows of a DataFrame.

`batch`, `stream` and `without_limits` (for older versions of Spark) have the readers that Spark calls, `options` and
`columns` parse the options. `fleet` finds the logs, and `fan_out_query` asks their brokers at once. `offsets` describes
the checkpoint of a stream. `partitions` divides spans into partitions and reads one.
"""
