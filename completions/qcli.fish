# Written by 'python -m qcli.generate'; do not edit.

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
