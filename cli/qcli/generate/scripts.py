"""Completion scripts. They do not depend on the commands: they ask `qcli` (see `qcli.framework.completion`).

Each line of an answer has a kind, a value and a help text, separated by tabs. The kinds are:

    plain        a candidate
    unfinished   a candidate that continues: the shell adds no space
    file, dir    the shell completes files or folders
"""

_NOTICE = "# Written by 'python -m qcli.generate'; do not edit."

_BASH = r"""
_qcli() {
    local kind value help
    COMPREPLY=()
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            plain) COMPREPLY+=("$value") ;;
            unfinished)
                COMPREPLY+=("$value")
                compopt -o nospace
                ;;
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
        esac
    done < <(
        QCLI_LINE="${COMP_LINE:0:COMP_POINT}" QCLI_WORDBREAKS="$COMP_WORDBREAKS" \
            _QCLI_COMPLETE=bash_complete "$1" 2>/dev/null
    )
}

complete -o nosort -F _qcli qcli 2>/dev/null || complete -F _qcli qcli
"""

_ZSH = r"""
_qcli() {
    local line kind value
    local -a fields plain unfinished
    local files='' folders=''
    for line in "${(@f)$(
        QCLI_WORDS="${(F)${(@Q)words[1,CURRENT-1]}}" QCLI_CURRENT="${(Q)words[CURRENT]}" \
            _QCLI_COMPLETE=zsh_complete "${(Q)words[1]}" 2>/dev/null
    )}"; do
        fields=("${(@ps:\t:)line}")
        value=${fields[2]}
        case ${fields[1]} in
            plain) plain+=("${value//:/\\:}:${fields[3]//\\/\\\\}") ;;
            unfinished) unfinished+=("$value") ;;
            file) files=1 ;;
            dir) folders=1 ;;
        esac
    done
    (( $#plain )) && _describe -V qcli plain
    (( $#unfinished )) && compadd -S '' -- "${unfinished[@]}"
    [[ -n $files ]] && _files
    [[ -n $folders ]] && _files -/
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _qcli "$@"
else
    compdef _qcli qcli
fi
"""

_FISH = r"""
function __qcli_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -lx QCLI_WORDS (string join \n -- $words | string collect)
    set -lx QCLI_CURRENT "$current"
    set -lx _QCLI_COMPLETE fish_complete
    for line in ($words[1] 2>/dev/null)
        set -l fields (string split \t -- $line)
        switch $fields[1]
            case plain unfinished
                printf '%s\t%s\n' $fields[2] $fields[3]
            case file
                __fish_complete_path $current
            case dir
                __fish_complete_directories $current
        end
    end
end

complete --command qcli --no-files --arguments '(__qcli_complete)'
"""


def completion_scripts() -> dict[str, str]:
    """The scripts by file name."""
    return {
        "qcli.bash": f"{_NOTICE}\n{_BASH}",
        "_qcli": f"#compdef qcli\n{_NOTICE}\n{_ZSH}",  # zsh wants its mark in the first line
        "qcli.fish": f"{_NOTICE}\n{_FISH}",
    }
