'use strict';
// Connections that move between networks and keep deadlines, as ordinary net.Sockets.
//
//   const d2tp = require('d2tp');
//   const socket = await d2tp.connect('d2tp://host:4433/KEY', { deadline: 3600 });
//   http.get(url, { agent: d2tp.agent({ proxy: PROXY }) }, …);
//
// The descriptor is the kernel's and Node reads and writes it as any other; only making it and its options go
// through libd2tp (binding.c). Options are those of docs/sockets.md.

const http = require('http');
const net = require('net');
const binding = require(process.env.D2TP_BINDING || './build/d2tp.node');

const POLICIES = ['free-only', 'free-first', 'balanced', 'fast', 'any'];
const IF_LATE = ['cell', 'wait', 'fail'];
const UNITS = ['bytes', 'ms'];

/** Words to numbers. */
function numbers({ deadline, size, policy, budget, priority, ifLate, persist, buffer }) {
  const all = { deadline, size, budget, priority };
  if (persist !== undefined) all.persist = Number(Boolean(persist));
  if (policy !== undefined) all.policy = POLICIES.indexOf(policy);
  if (ifLate !== undefined) all.ifLate = IF_LATE.indexOf(ifLate);
  for (const [name, value] of Object.entries(all)) {
    if (value === undefined) delete all[name];
    else if (!(Number.isSafeInteger(value) && value >= 0)) throw new RangeError(`${name}: ${value}`);
  }
  if (buffer !== undefined) {
    const { low, high, unit = 'bytes', rate = 0 } = buffer;
    all.buffer = [low, high, UNITS.indexOf(unit), rate];
    if (!all.buffer.every((value) => Number.isSafeInteger(value) && value >= 0)) throw new RangeError('buffer');
  }
  return all;
}

/** A connection; what only D2TP knows of it beside what a net.Socket does. */
class Socket extends net.Socket {
  #fd;

  constructor(fd) {
    super({ fd, readable: true, writable: true, allowHalfOpen: true });
    this.#fd = fd;
  }

  /** Changes options: deadline (seconds, 0 for none), size, policy, budget, ifLate, buffer. */
  options(options) {
    if (this.destroyed) throw new Error('the socket is closed');
    binding.set(this.#fd, numbers(options));
  }

  _destroy(error, done) {
    // While the descriptor is there: what the kernel says is less than what is known.
    const cause = error ? binding.cause(this.#fd) : '';
    if (error && cause) error.message = cause;
    super._destroy(error, done);
  }
}

/**
 * Connects to a D2TP server ("d2tp://host:port/KEY"), or to any "host:port" through the proxy. Options: deadline
 * (seconds), size, policy, budget, priority, ifLate, proxy, persist, buffer: { low, high, unit: 'bytes' or 'ms', rate }.
 * Without a network it waits for one.
 */
async function connect(address, options = {}) {
  let [node, service] = [address, ''];
  if (!address.startsWith('d2tp://')) {
    const at = address.lastIndexOf(':');
    [node, service] = [address.slice(0, at).replace(/^\[|\]$/g, ''), address.slice(at + 1)];
  }
  return new Socket(await binding.connect(node, service, options.proxy || '', numbers(options)));
}

/** An http.Agent whose connections are D2TP's, with these options of `connect`. */
function agent(options = {}) {
  const agent = new http.Agent();
  agent.createConnection = (to, done) => {
    connect(`${to.host}:${to.port}`, options).then((socket) => done(null, socket), done);
  };
  return agent;
}

module.exports = { connect, agent, Socket };
