#!/bin/sh
# serve.sh BIN MODEL BIND: starts the service with its APIs, which says how to call it when it is ready.
set -eu
bin=$1 model=$2 bind=$3
grpc_port=${GRPC_PORT:-8033} http_port=${PORT:-3000}

# Succeeds if the model, a directory, a GGUF file or an id in the hub cache, has a chat template.
has_template() {
	if [ -f "$1" ]; then
		head -c 67108864 "$1" | grep -aq tokenizer.chat_template
		return
	fi
	hub=${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}
	for directory in "$1" "$hub/models--$(echo "$1" | sed 's,/,--,g')"/snapshots/*; do
		[ ! -e "$directory/chat_template.jinja" ] || return 0
		! grep -qs '"chat_template"' "$directory/tokenizer_config.json" "$directory/chat_template.json" || return 0
		for file in "$directory"/*.gguf; do
			[ ! -f "$file" ] || ! has_template "$file" || return 0
		done
	done
	return 1
}

playground=false
if [ -n "${CHAT_TEMPLATE:-}" ] || has_template "$model"; then
	playground=true
fi
export HTTP_API="${HTTP_API:-openai}" PLAYGROUND="${PLAYGROUND:-$playground}"

# Prints examples of calls for what is served, each in one line, because several router workers prefix their lines.
show_examples() {
	cat <<EOF
The service is ready. In another terminal or in a browser, try:

  $bin/tgis client stream --target localhost:$grpc_port --max-new-tokens 60 'Once upon a time'

EOF
	if $playground; then
		cat <<EOF
  curl http://localhost:$http_port/v1/chat/completions -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
EOF
		[ "$PLAYGROUND" != true ] || printf '\n  http://localhost:%s/playground\n' "$http_port"
	else
		cat <<EOF
  curl http://localhost:$http_port/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}'

The model has no chat template, so there are no chats and no playground.
EOF
	fi
	printf '\nCtrl-C stops the service.\n'
}
READY_TEXT=$(show_examples)
export READY_TEXT
exec "$bin/text-generation-launcher" --model-name "$model" --bind "$bind" --port "$http_port" --grpc-port "$grpc_port"
