# Written by 'python -m qcli.generate'; do not edit.

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
