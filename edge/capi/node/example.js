'use strict';
// A connection to a D2TP server and a page through the proxy. tests/languages.rs runs it.
//
//   node example.js SERVER PROXY URL

const assert = require('assert');
const { once } = require('events');
const http = require('http');
const d2tp = require('.');

const [server, proxy, url] = process.argv.slice(2);

async function all(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return Buffer.concat(pieces);
}

async function main() {
  const socket = await d2tp.connect(server, { deadline: 60, policy: 'free-only' });
  const message = Buffer.alloc(300_000, 'node');
  socket.end(message);
  assert(message.equals(await all(socket)));
  console.log('socket ok');

  const buffer = { low: 2000, high: 20_000, unit: 'ms', rate: 80_000 };
  const read = await d2tp.connect(server, { buffer });
  read.options({ buffer: { low: 200_000, high: 1_000_000 } });
  assert.throws(() => read.options({ buffer: { low: 2, high: 1 } }), { errno: 22 });
  assert.throws(() => read.options({ buffer: { low: 1, high: 2, unit: 'days' } }), RangeError);
  read.destroy();

  const idle = await d2tp.connect(server);
  idle.options({ deadline: 1 });
  idle.resume();
  const [error] = await once(idle, 'error').then(([e]) => [e], (e) => [e]);
  console.log('deadline ok:', error.message);

  const agent = d2tp.agent({ proxy, deadline: 60 });
  const [answer] = await once(http.get(url, { agent }), 'response');
  console.log('http ok:', (await all(answer)).toString());

  await assert.rejects(d2tp.connect('nobody.example:80', { proxy }), (error) => {
    console.log('refused:', error.message);
    return error.errno === 113;
  });
}

main().then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
