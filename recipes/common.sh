# What every run.sh begins with: --help and --dry-run, and functions for its commands. Sourced, never run.
#
# --help shows the comment at the head of the recipe, and how long its rows took; --dry-run prints the commands instead
# of running them, and needs no data. Afterwards the arguments are those of the recipe alone.

here=$(cd "$(dirname "$0")" && pwd)
dry=

# Print how long the rows took when the committed results were measured.
estimate() { "${PYTHON:-python3}" "$here/../estimate.py" "$here"; }

# Run a command, or print it in a dry run, with quotes where a shell needs them.
run() {
    [ -n "$dry" ] || {
        "$@"
        return
    }
    local word line=
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./,:=%+-]+$ ]] || word=$(printf '%q' "$word")
        line+="$word "
    done
    echo "${line% }"
}

specguard() {
    if [ -z "$dry" ]; then
        "${PYTHON:-python3}" -m specguard "$@"
    else
        run specguard "$@"
    fi
}

# Run a script or, after -m, a module of recipes.
python() { run env "PYTHONPATH=${here%/*}${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" "$@"; }

usage=$(sed -n 's/^# Usage: //p' "$0")
words=()
for word in "$@"; do
    case $word in
        -h | --help)
            sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"
            echo "Options: --help; --dry-run, which prints the commands and runs none."
            estimate
            exit 0
            ;;
        --dry-run) dry=1 ;;
        -*)
            echo "$word is no option; usage: $usage" >&2
            exit 2
            ;;
        *) words+=("$word") ;;
    esac
done
set -- ${words[@]+"${words[@]}"}

needed=${usage#run.sh }
needed=${needed%% *}
if [ $# = 0 ] && [ "${needed#[}" = "$needed" ]; then # the first argument has no default
    if [ -z "$dry" ]; then
        echo "usage: $usage" >&2
        exit 2
    fi
    set -- "$needed"
fi
estimate >&2
