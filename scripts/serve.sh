#!/bin/sh
# serve.sh BIN MODEL BIND: starts the service with its APIs and says how to ask it.
set -eu
bin=$1 model=$2 bind=$3
grpc_port=${GRPC_PORT:-8033} http_port=${PORT:-3000}
cat >&2 <<EOF

Serving $model on $bind. As soon as the log says "serving", ask it, in another terminal or in a browser:

  $bin/tgis client stream --target localhost:$grpc_port --max-new-tokens 60 'Once upon a time'

  curl http://localhost:$http_port/v1/chat/completions -d \\
    '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'

  http://localhost:$http_port/playground

EOF
export HTTP_API="${HTTP_API:-openai}" PLAYGROUND="${PLAYGROUND:-true}"
exec "$bin/text-generation-launcher" --model-name "$model" --bind "$bind" --port "$http_port" --grpc-port "$grpc_port"
