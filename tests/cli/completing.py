"""Ask `qcli` for completions, as the shell scripts do."""

from cli.support import Cli


def ask(qcli: Cli, line: str, **env: str) -> list[list[str]]:
    """Return the candidates for zsh and fish, as fields. Repeats while a busy machine causes timeouts."""
    *words, current = line.split(" ")
    env = {"QCLI_COMPLETION_TIMEOUT": "20s"} | env
    env |= {"_QCLI_COMPLETE": "zsh_complete", "QCLI_WORDS": "\n".join(words), "QCLI_CURRENT": current}
    result = qcli(env=env)
    assert (result.code, result.err) == (0, "")
    return [answer.split("\t") for answer in result.out.decode().splitlines() if answer]
