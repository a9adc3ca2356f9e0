// Calls fmaas.GenerationService and prints what came back, as JSON lines. Shares nothing with the service but
// the .proto file.
//
//   node client.js ADDRESS PROTO < plan.json
//
// A plan is a list of rounds, one after another; a round is a list of calls, all at once; all calls share one
// channel. A call:
//   name        what its lines are called
//   method      of the service, or a full path such as /fmaas.GenerationService/Nothing with an empty message
//   request     the message, in the names of the .proto file
//   copies      how many of it at once, 1 by default
//   deadlineMs  after which the client gives up
//   cancelAfter messages after which it cancels; for a unary call, milliseconds
//   gzip        whether the message is sent compressed, on a channel that does so
//   raw         instead of all that: {headers, body}, sent over HTTP/2 as they are; the body in base64
// Lines: {name, copy, message} for each message, {name, copy, code, details, ms} at the end of a call,
// {round, connected} after each round: whether the channel was ready throughout.

'use strict';

const http2 = require('node:http2');
const fs = require('node:fs');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const SERVICE = 'fmaas.GenerationService';
const READY = grpc.connectivityState.READY;
const GZIP = grpc.compressionAlgorithms.gzip;

function print(line) {
  const isPlain = (value) => typeof value !== 'number' || Number.isFinite(value);
  const plain = (_key, value) => (isPlain(value) ? value : String(value)); // JSON has no NaN
  process.stdout.write(`${JSON.stringify(line, plain)}\n`);
}

function load(proto) {
  const definition = protoLoader.loadSync(proto, {
    keepCase: true,
    longs: String,
    enums: String,
    defaults: true,
    arrays: true,
    oneofs: true,
  });
  return grpc.loadPackageDefinition(definition).fmaas.GenerationService;
}

// Ends with {code, details}; prints messages on the way.
function invoke(client, Service, call, copy) {
  const options = call.deadlineMs === undefined ? {} : { deadline: Date.now() + call.deadlineMs };
  const metadata = new grpc.Metadata({ waitForReady: true });
  const tell = (message) => print({ name: call.name, copy, message });
  if (call.method.startsWith('/')) return unknown(client, call, metadata, options);
  if (Service.service[call.method].responseStream) return stream(client, call, metadata, options, tell);
  return unary(client, call, metadata, options, tell);
}

function unknown(client, call, metadata, options) {
  const nothing = () => Buffer.alloc(0);
  return new Promise((resolve) => {
    const answered = (error) => resolve(status(error));
    client.makeUnaryRequest(call.method, nothing, nothing, {}, metadata, options, answered);
  });
}

function unary(client, call, metadata, options, tell) {
  return new Promise((resolve) => {
    const sent = client[call.method](call.request, metadata, options, (error, message) => {
      if (!error) tell(message);
      resolve(status(error));
    });
    if (call.cancelAfter !== undefined) setTimeout(() => sent.cancel(), call.cancelAfter);
  });
}

function stream(client, call, metadata, options, tell) {
  return new Promise((resolve) => {
    const answer = client[call.method](call.request, metadata, options);
    let received = 0;
    answer.on('data', (message) => {
      tell(message);
      received += 1;
      if (received === call.cancelAfter) answer.cancel();
    });
    answer.on('error', () => {}); // the status tells the same
    answer.on('status', (end) => resolve(status(end)));
  });
}

function status(end) {
  return end === null ? { code: 'OK', details: '' } : { code: grpc.status[end.code], details: end.details };
}

// A call as bytes on a connection of its own, to say what no gRPC library would.
function invokeRaw(address, call) {
  return new Promise((resolve) => {
    const session = http2.connect(`http://${address}`);
    const end = {};
    const finish = (found) => {
      session.close();
      const details = decodeURIComponent(found['grpc-message'] ?? '');
      resolve({ code: found['grpc-status'] ?? 'none', details, ...end });
    };
    session.on('error', () => finish({}));
    const request = session.request({
      ':method': 'POST',
      'content-type': 'application/grpc',
      te: 'trailers',
      ...call.raw.headers,
    });
    let found = {};
    request.on('response', (headers) => {
      end.http = headers[':status'];
      found = headers;
    });
    request.on('trailers', (trailers) => (found = trailers));
    request.on('data', () => {});
    request.on('error', () => {});
    request.on('close', () => finish(found));
    request.setTimeout(call.deadlineMs ?? 20000, () => {
      found = { 'grpc-status': 'no answer' };
      request.close(http2.constants.NGHTTP2_CANCEL);
    });
    request.end(Buffer.from(call.raw.body, 'base64'));
  });
}

function ready(client) {
  return new Promise((resolve, reject) =>
    client.waitForReady(Date.now() + 20000, (error) => (error ? reject(error) : resolve())),
  );
}

async function main(address, proto) {
  const Service = load(proto);
  const limits = { 'grpc.max_receive_message_length': -1, 'grpc.max_send_message_length': -1 };
  const credentials = grpc.credentials.createInsecure();
  const client = new Service(address, credentials, limits);
  const packed = { ...limits, 'grpc.default_compression_algorithm': GZIP };
  const packing = new Service(address, credentials, packed);
  await ready(client);
  const channel = client.getChannel();
  let connected = true;
  channel.watchConnectivityState(READY, Infinity, () => (connected = false));
  const plan = JSON.parse(fs.readFileSync(0, 'utf8'));
  for (const [round, calls] of plan.entries()) {
    await Promise.all(
      calls.flatMap((call) =>
        Array.from({ length: call.copies ?? 1 }, async (_, copy) => {
          const started = performance.now();
          const through = call.gzip ? packing : client;
          const end = await (call.raw ? invokeRaw(address, call) : invoke(through, Service, call, copy));
          print({ name: call.name, copy, ...end, ms: performance.now() - started });
        }),
      ),
    );
    print({ round, connected });
  }
  client.close();
  packing.close();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
