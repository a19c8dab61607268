'use strict';
// Connections to a D2TP server, a server of its own and a page through the proxy. bindings/tests/languages/fetch.rs runs it.
//
//   node example.js SERVER PROXY URL
//
// And a connection that is opened again, beside an agent (bindings/tests/languages/reopen.rs):
//
//   node example.js keep SERVER FILE      is killed when it has said "kept"; FILE: the token
//   node example.js again FILE

const assert = require('assert');
const dgram = require('dgram');
const { once } = require('events');
const fs = require('fs');
const http = require('http');
const d2tp = require('.');

async function all(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return Buffer.concat(pieces);
}

/** So many bytes. */
async function hear(socket, bytes) {
  for (;;) {
    const heard = socket.read(bytes);
    if (heard) return heard.toString();
    await once(socket, 'readable');
  }
}

/** What only D2TP knows of a connection, and may be told. */
async function known(server) {
  const socket = await d2tp.connect(server, { deadline: 60 });
  socket.write('known');
  await socket.flush(60_000);
  assert.equal(await hear(socket, 5), 'known');
  const info = await socket.info();
  assert(info.state === 'connected' && info.bytesAcked === 5 && info.bytesReceived === 5, JSON.stringify(info));
  assert(info.slack > 0 && info.slack <= 60_000 && info.paths[0].state === 'works', JSON.stringify(info));
  socket.options({ deadline: 0, size: 10, policy: 'any', budget: 0, ifLate: 'wait' });
  assert.equal((await socket.info()).slack, null);
  assert.equal(socket.token, undefined);
  socket.end();
  await socket.flush(60_000);
  socket.destroy();
  assert.throws(() => socket.options({ size: 1 }), /closed/);
  d2tp.networkChanged();
  for (const release of [d2tp.acquireDlock(), d2tp.acquireDlock()]) {
    release();
    release();
  }
  console.log('known ok');
}

async function serve() {
  const pages = http.createServer((asked, answer) => answer.end('by D2TP'));
  const server = d2tp.createServer((socket) => {
    assert(socket.far.startsWith('127.0.0.1:'), socket.far);
    pages.emit('connection', socket);
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { address } = server;
  const port = Number(address.match(/:(\d+)\//)[1]);
  assert.throws(() => d2tp.createServer().listen(port, '127.0.0.1'), { errno: -98, code: 'EADDRINUSE' });
  assert.throws(() => d2tp.createServer().listen(0, 'localhost'), { errno: -22, code: 'EINVAL' });
  const socket = await d2tp.connect(address);
  const [answer] = await once(http.get('http://any.example/', { createConnection: () => socket }), 'response');
  const said = (await all(answer)).toString();
  socket.destroy();
  pages.closeAllConnections();
  server.close();
  await once(server, 'close');
  // It is free when what was accepted is over, too.
  for (let again = d2tp.createServer(); !again.listening; ) {
    try {
      again.listen(port, '127.0.0.1').close();
      break;
    } catch (error) {
      assert.equal(error.code, 'EADDRINUSE');
      await new Promise((done) => setTimeout(done, 10));
    }
  }
  console.log('listen ok:', said);
}

/** What a connection that is to be kept hears where nobody keeps it. */
async function alone(server) {
  for (const attempt of [() => d2tp.reopen(Buffer.alloc(32)), () => d2tp.connect(server, { persist: 'open' })]) {
    await assert.rejects(attempt(), (error) => error.code === 'EOPNOTSUPP' && error.message.includes('start `cedos agent`'));
  }
  await assert.rejects(d2tp.reopen(Buffer.alloc(31)), { errno: -22, code: 'EINVAL' });
  await assert.rejects(d2tp.connect(server, { persist: 'for ever' }), RangeError);
  console.log('alone ok');
}

async function keep(server, file) {
  const socket = await d2tp.connect(server, { persist: 'open' });
  socket.write('first ');
  assert.equal(await hear(socket, 6), 'first ');
  const { token } = socket;
  fs.writeFileSync(file, token, { mode: 0o600 });
  // That leaves it, to who comes after this process.
  socket.destroy();
  await once(socket, 'close');
  await assert.rejects(d2tp.reopen(token), (error) => {
    console.log('kept:', error.message);
    return error.code === 'EBUSY';
  });
  await all(process.stdin);
}

async function again(file) {
  const token = fs.readFileSync(file);
  const socket = await d2tp.reopen(token);
  // Not before: what Node has read and the program has not, is lost with the process.
  socket.write('second');
  assert.equal(await hear(socket, 6), 'second');
  assert(socket.token.equals(token));
  socket.write('third');
  assert.equal(await hear(socket, 5), 'third');
  await socket.flush(60_000);
  assert.equal((await socket.info()).bytesAcked, 17);
  await socket.endForGood();
  await assert.rejects(d2tp.reopen(token), (error) => {
    console.log('ended:', error.message);
    return error.code === 'ENOENT';
  });
}

/** Where nobody answers: whoever gives up is heard, and what still waits holds up no exit. */
async function givenUp(proxy) {
  const nobody = dgram.createSocket('udp4').bind(0, '127.0.0.1');
  await once(nobody, 'listening');
  const absent = `d2tp://127.0.0.1:${nobody.address().port}/${proxy.split('/').pop()}`;
  const request = http.get('http://nobody.example/', { agent: d2tp.agent({ proxy: absent }), timeout: 200 });
  await once(request, 'timeout');
  request.destroy();
  const [error] = await once(request, 'error');
  assert.equal(error.code, 'ECONNRESET');
  const socket = d2tp.createConnection('nobody.example:80', { proxy: absent });
  assert(socket.connecting);
  socket.write('never');
  setTimeout(() => socket.destroy(), 50);
  await once(socket, 'close');
  await assert.rejects(d2tp.connect('nobody.example:80', { deadlin: 60 }), (error) => {
    return error instanceof TypeError && error.message.includes('deadlin ');
  });
  assert.throws(() => d2tp.agent({ prox: proxy }), /no option prox /);
  await assert.rejects(d2tp.connect('nobody.example:80', { policy: 'cheap' }), /policy: cheap/);
  await assert.rejects(d2tp.connect('nobody.example:80', { proxy: 'http://here' }), /http:..here is not d2tp/);
  // In the threads of Node's pool these would hold up the end of the process.
  for (let i = 0; i < 8; i++) d2tp.connect('nobody.example:80', { proxy: absent }).catch(() => {});
  await new Promise((done) => setTimeout(done, 50));
  nobody.close();
  console.log('given up ok');
}

async function everything(server, proxy, url) {
  const socket = await d2tp.connect(server, { deadline: 60, policy: 'free-only' });
  const message = Buffer.alloc(300_000, 'node');
  socket.end(message);
  assert(message.equals(await all(socket)));
  console.log('socket ok');

  const buffer = { low: 2000, high: 20_000, unit: 'ms', rate: 80_000 };
  const read = await d2tp.connect(server, { buffer });
  read.options({ buffer: { low: 200_000, high: 1_000_000 } });
  assert.throws(() => read.options({ buffer: { low: 2, high: 1 } }), { errno: -22, code: 'EINVAL' });
  assert.throws(() => read.options({ buffer: { low: 1, high: 2, unit: 'days' } }), RangeError);
  read.destroy();

  const idle = await d2tp.connect(server);
  idle.options({ deadline: 1 });
  idle.resume();
  const [error] = await once(idle, 'error').then(([e]) => [e], (e) => [e]);
  console.log('deadline ok:', error.message);

  await known(server);
  await serve();
  await alone(server);

  const agent = d2tp.agent({ proxy, deadline: 60 });
  const [answer] = await once(http.get(url, { agent }), 'response');
  console.log('http ok:', (await all(answer)).toString());

  // An address of IPv6 in numbers goes to the proxy as any other; what it makes of it is its own.
  const six = new URL(url);
  six.hostname = '[::1]';
  await once(http.get(six.href, { agent }), 'response').then(
    async ([answer]) => console.log('ipv6 ok:', (await all(answer)).toString()),
    (error) => console.log('ipv6 refused:', error.message),
  );

  await assert.rejects(d2tp.connect('nobody.example:80', { proxy }), (error) => {
    console.log('refused:', error.message);
    return error.code === 'EHOSTUNREACH' && error.errno === -113;
  });
  await givenUp(proxy);
}

const [first, ...others] = process.argv.slice(2);
const main = { keep, again }[first] || ((...more) => everything(first, ...more));
main(...others).then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
