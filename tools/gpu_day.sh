#!/bin/sh
# The first hour on a machine with a GPU: stages of at most eight minutes, each of which writes as it goes.
#
#   [PYTHON=python3] [OUT=build/gpu-day] tools/gpu_day.sh [1 2 2b 3 3b 4 5]
#
# 1 every kernel once against the torch bodies, smallest shapes; the first wrong one ends the day
# 2 all formats, steps, pages, prompts; 2b tests/kernels/triton, where pytest is there, and compute-sanitizer
# 3 attention of decode steps beside exact kernels; 3b of latents, and of prompts
# 4 encoding, and steps of a whole model, as ever and as a graph
# 5 vLLM beside kvpact in vLLM, where vLLM is there
#
# Nothing is installed: the source tree is used as it is, with the machine's own torch and Triton. Without
# a GPU stages 1 and 2 are interpreted, and 3 and 4 are dry runs that time nothing.
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$root/build/gpu-day}
mkdir -p "$out"
"$python" "$root/tools/gpu_day/metadata.py" "$root/pyproject.toml" "$out/metadata" || exit 1
export PYTHONPATH="$root/src:$out/metadata:$root/benchmarks:$root/tests/helpers:$root/tools/triton_aot"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
cd "$root" || exit 1
dry=
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
	export TRITON_INTERPRET=1
	dry="--dry --tokens 64 --batch 1 --rounds 1 --layers 2 --specs turboquant:bits=4 int:bits=8"
fi

# Seconds, a name, and a command: what it prints is seen and kept, its status returned. Interpreted it may take an hour.
stage() {
	limit=${dry:+3600} limit=${limit:-$1} log=$out/$2.log
	shift 2
	echo "== $* (at most $limit s)"
	{ timeout "$limit" "$@" 2>&1; echo "status $?"; } | tee "$log"
	[ "$(tail -n 1 "$log")" = "status 0" ]
}

has() { "$python" -c "import $1" 2>/dev/null; }

bench() {
	name=$1 && shift
	# shellcheck disable=SC2086
	stage 480 "$name" "$python" benchmarks/gpu.py $dry --out "$out/$name" --parts "$@"
}

for number in ${*:-1 2 2b 3 3b 4 5}; do
	case $number in
	1) stage 480 smoke "$python" tools/gpu_day/gpu_compare.py smoke --out "$out" || exit 1 ;;
	2) stage 480 formats "$python" tools/gpu_day/gpu_compare.py formats --out "$out" ;;
	2b)
		if [ -z "$dry" ] && has pytest; then
			stage 300 tests "$python" -m pytest -q -o addopts="--import-mode=importlib" -m "not slow and not neon" \
				--ignore tests/kernels/triton/test_ahead_of_time.py tests/kernels/triton tests/cache/test_devices.py
		fi
		if [ -z "$dry" ] && command -v compute-sanitizer >/dev/null; then
			stage 180 sanitizer compute-sanitizer --error-exitcode 1 \
				"$python" tools/gpu_day/gpu_compare.py smoke --only int:bits=8 --out "$out"
		fi
		;;
	3) bench attention decode ;;
	3b) bench prompts latent prompt ;;
	4) bench steps encode model ;;
	5)
		if [ -z "$dry" ] && has vllm; then
			stage 480 vllm "$python" benchmarks/vllm_decode.py --tokens 2048 8000
		else
			echo "== 5: left out, vLLM or a GPU is not there"
		fi
		;;
	esac
done
