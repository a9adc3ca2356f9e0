#!/bin/sh
# serve.sh BIN MODEL BIND: starts the service and says how to ask it.
set -eu
bin=$1 model=$2 bind=$3
grpc_port=${GRPC_PORT:-8033} http_port=${PORT:-3000}
cat >&2 <<EOF

Serving $model on $bind. As soon as the log says "serving", ask in another terminal:

  $bin/tgis client stream --target localhost:$grpc_port --max-new-tokens 60 'The with statement is used to'
  curl localhost:$http_port/health

EOF
exec "$bin/text-generation-launcher" --model-name "$model" --bind "$bind" --port "$http_port" --grpc-port "$grpc_port"
