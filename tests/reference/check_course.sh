#!/bin/sh
# The hand-in folder in a clean Debian root, with uvicorn from PyPI and the course's own
# command: is it healthy, does it answer one question and 358 in one request, does it end on SIGTERM? As root:
#   make serve && deploy/course/pack.sh /tmp/hand-in ./serve      (or make course)
#   debootstrap --variant=minbase --include=python3 bookworm /tmp/root
#   tests/reference/check_course.sh /tmp/hand-in /tmp/root
set -eu
folder=$1 root=$2 port=8000 url=http://127.0.0.1:8000
here=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$root/app" "$root/site"
cp -r "$folder" "$root/app"
if [ ! -e "$root/app/model" ]; then # the default model stands for weights
    cp "$here/data/tiny/model.bin" "$root/app/model"
    cp "$here/data/tiny/tokenizer.bin" "$root/app/"
fi
python3 -m pip install --quiet --root-user-action ignore --target "$root/site" uvicorn
sed -i "1s,.*,#!/usr/bin/python3," "$root/site/bin/uvicorn" # (pip names the python of this machine)
began=$(date +%s)
chroot "$root" env -i PATH=/site/bin:/usr/bin:/bin PYTHONPATH=/site sh -c \
    "cd /app && exec uvicorn serve:app --host 0.0.0.0 --port $port" >"$root/log" 2>"$root/err" &
process=$!
trap 'kill -9 $process 2>/dev/null || true' EXIT
until curl -sf $url/ >"$root/health"; do
    kill -0 $process 2>/dev/null || { cat "$root/err"; exit 1; }
    [ $(($(date +%s) - began)) -lt 420 ] || { echo "not healthy in 420 s"; exit 1; }
    sleep 0.2
done
echo "healthy after $(($(date +%s) - began)) s: $(cat "$root/health"); the process is $(tr '\0' ' ' </proc/$process/cmdline | cut -d' ' -f1)"
python3 - "$here" $url <<'EOF'
import json, sys, time, urllib.request
here, url = sys.argv[1:]
rows = [json.loads(line)["instruction"] for name in ("gpu_qa", "exam_qa") for line in open(f"{here}/data/course/{name}.jsonl")]
def predict(prompt):
    request = urllib.request.Request(url + "/predict", json.dumps({"prompt": prompt}).encode(), {"Content-Type": "application/json"})
    began = time.time()
    return json.load(urllib.request.urlopen(request, timeout=360))["response"], time.time() - began
one, seconds = predict(rows[0])
assert isinstance(one, str) and one
print(f"one question: {seconds:.2f} s: {one[:60]}")
many, seconds = predict(rows[:358])
assert len(many) == 358 and all(isinstance(text, str) and text for text in many) and many[0] == one
print(f"358 questions: {seconds:.2f} s, {sum(map(len, many))} characters")
EOF
kill -TERM $process
wait $process && echo "ended on SIGTERM with status 0" || { echo "ended with status $?"; exit 1; }
