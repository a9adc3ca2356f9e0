#!/bin/sh
# gateway.sh BIN GATEWAY_BIN MODEL: starts two services of a model and the Shepherd Model Gateway in front of them, all
# on loopback, and says how to ask the gateway. An interrupt ends all of them.
set -eu
bin=$1 gateway_bin=$2 model=$3
port=${PORT:-3200}
logs=$(mktemp -d)
pids=

stop() {
	trap - EXIT INT TERM
	# shellcheck disable=SC2086 # a list of process ids
	kill $pids 2>/dev/null || true
	wait
	echo "The logs are in $logs."
}
trap stop EXIT
trap 'exit 130' INT TERM

for number in 1 2; do
	"$bin/text-generation-launcher" --model-name "$model" --bind 127.0.0.1 --port $((port + 2 * number)) \
		--grpc-port $((port + 2 * number + 1)) --grpc-api fmaas,vllm-engine > "$logs/service-$number.log" 2>&1 &
	pids="$pids $!"
done
echo "Two services load $model; their logs are in $logs." >&2
for number in 1 2; do
	until grep -q 'serving gRPC' "$logs/service-$number.log"; do
		# shellcheck disable=SC2086
		kill -0 $pids 2>/dev/null || { tail -n 5 "$logs/service-$number.log" >&2; exit 1; }
		sleep 0.5
	done
done
"$gateway_bin/smg" launch --host 127.0.0.1 --port "$port" --prometheus-port $((port + 1)) \
	--worker-urls "grpc://127.0.0.1:$((port + 3))" "grpc://127.0.0.1:$((port + 5))" > "$logs/gateway.log" 2>&1 &
pids="$pids $!"
gateway=$!
until curl -fs -o /dev/null "http://127.0.0.1:$port/readiness"; do
	kill -0 "$gateway" 2>/dev/null || { tail -n 5 "$logs/gateway.log" >&2; exit 1; }
	sleep 0.5
done
cat >&2 <<EOF

The gateway serves both. Ask it, in another terminal:

  curl http://127.0.0.1:$port/v1/chat/completions -H 'content-type: application/json' -d \\
    '{"model": "$(basename "$model" .gguf)", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'

  curl http://127.0.0.1:$port/v1/responses -H 'content-type: application/json' -d \\
    '{"model": "$(basename "$model" .gguf)", "input": "What is the capital of France?", "temperature": 0}'

EOF
wait
