"""Scripts for greetings, command lines, every command in every state, and connections that end too early."""

from struct import pack

from interop.same.stage import END, GONE, Script, batch, half_close, identify, pub, raw, same, sized

SUB = b"SUB T c\n"

COMMANDS = {
    "IDENTIFY": identify(),
    "AUTH": b"AUTH\n" + sized(b"secret"),
    "SUB": b"SUB T c\n",
    "PUB": pub(b"x"),
    "MPUB": b"MPUB T\n" + batch(b"x", b"y"),
    "DPUB": b"DPUB T 3600000\n" + sized(b"x"),
    "RDY": b"RDY 0\n",
    "FIN": b"FIN " + GONE + b"\n",
    "REQ": b"REQ " + GONE + b" 0\n",
    "TOUCH": b"TOUCH " + GONE + b"\n",
    "CLS": b"CLS\n",
    "NOP": b"NOP\n",
    "an unknown verb": b"NOPE\n",
}
STATES = {"init": b"NOP\n", "subscribed": b"SUB T c\n", "closing": b"SUB T c\nCLS\n"}

SCRIPTS: dict[str, Script] = {
    f"{verb} in state {state}": same(before + command + END)
    for verb, command in COMMANDS.items()
    for state, before in STATES.items()
} | {
    # -- greeting
    "magic of V1": same(raw(b"  V1")),
    "magic with a line feed": same(raw(b"V2\n\n")),
    "no magic": same(raw(b"GET ")),
    "magic and the first command apart": same(raw(b"  "), raw(b"V2"), raw(b"NOPE\n")),
    "magic twice": same(b"  V2\n"),
    "nothing but the magic": same(b"", half_close),
    "nothing": same(raw(b""), half_close),
    "half a magic": same(raw(b"  "), half_close),
    # -- lines
    "empty line": same(b"\n"),
    "carriage return": same(b"NOP\r\nNOPE\r\n"),
    "two carriage returns": same(b"NOP\r\r\n"),
    "carriage return alone": same(b"\r\n"),
    "carriage return after a parameter": same(b"SUB T c\r\nRDY 1\r\n" + pub(b"x"), 3, b"FIN {0}\r\n" + END),
    "carriage return in the middle": same(b"NOP\rNOP\n"),
    "verb in lower case": same(b"pub T\n"),
    "verb and more": same(b"NOPX\n"),
    "leading space": same(b" NOP\n"),
    "tab instead of a space": same(b"PUB\tT\n"),
    "doubled space": same(b"PUB  T\n"),
    "space at the end": same(b"NOP \nPUB T \n" + sized(b"x") + END),
    "bytes that are no text": same(b"\xff\x00\n"),
    "text that is not ASCII": same("ПРИВЕТ\n".encode()),
    "surplus parameters": same(b"NOP 1 2\nPUB T more\n" + sized(b"x") + END),
    "overlong line": same(b"x" * 16385),
    "overlong by the line feed": same(b"NOP " + b"x" * 16380 + b"\n" + END),
    "longest line": same(b"NOP " + b"x" * 16379 + b"\n" + END),
    "longest line with a carriage return": same(b"NOP " + b"x" * 16378 + b"\r\n" + END),
    "half a line": same(b"PUB T", half_close),
    # -- bodies that end too early
    "no IDENTIFY size": same(b"IDENTIFY\n\0\0", half_close),
    "half an IDENTIFY": same(identify()[:-1], half_close),
    "no AUTH size": same(b"AUTH\n\0\0\0", half_close),
    "half an AUTH": same(b"AUTH\n" + sized(b"secret")[:-1], half_close),
    "no PUB size": same(b"PUB T\n\0", half_close),
    "half a PUB": same(b"PUB T\n" + sized(b"half")[:-1], half_close),
    "no DPUB size": same(b"DPUB T 1\n\0", half_close),
    "half a DPUB": same(b"DPUB T 1\n" + sized(b"half")[:-1], half_close),
    "no MPUB size": same(b"MPUB T\n\0", half_close),
    "no MPUB count": same(b"MPUB T\n" + batch(b"1")[:6], half_close),
    "no MPUB message": same(b"MPUB T\n" + batch(b"1")[:8], half_close),
    "half an MPUB size": same(b"MPUB T\n" + batch(b"1", b"2")[:-2], half_close),
    "half an MPUB message": same(b"MPUB T\n" + batch(b"1", b"22")[:-1], half_close),
    # -- order of answers and errors
    "answers before the error": same(pub(b"1") + b"MPUB T\n" + batch(b"2") + b"PUB |\n"),
    "commands after the error": same(pub(b"1") + b"NOPE\n" + pub(b"2")),
    "three errors that are none": same(SUB + COMMANDS["FIN"] + COMMANDS["REQ"] + COMMANDS["TOUCH"] + END),
    "answers in the order of the commands": same(
        SUB
        + b"".join(pub(b"%d" % n) + b"FIN %016d\n" % n + b"MPUB T\n" + batch(b"a") for n in range(20))
        + b"DPUB T 3600000\n"
        + sized(b"x")
        + END
    ),
    "the error of a size before its body": same(b"PUB T\n" + pack(">i", 1048577)),
}
