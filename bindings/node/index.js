'use strict';
// Connections that move between networks and keep deadlines, as ordinary net.Sockets.
//
//   const d2tp = require('d2tp');
//   const socket = await d2tp.connect('d2tp://host:4433/KEY', { deadline: 3600 });
//   http.get(url, { agent: d2tp.agent({ proxy: PROXY }) }, …);
//   const server = d2tp.createServer((socket) => …).listen(4433);
//
// The descriptor is the kernel's and Node reads and writes it as any other; only making it and its options go
// through libd2tp (src/lib.rs). Options are those of docs/sockets.md. Errors have the cause in words, the number
// (errno, below zero) and its word (code: 'ECONNREFUSED'), as Node's own.

const { EventEmitter } = require('events');
const fs = require('fs');
const http = require('http');
const net = require('net');
const path = require('path');
const binding = load(process.env.D2TP_BINDING || found());

/** The binding that build.sh made here, else the one that came with the package for this machine. */
function found() {
  const built = path.join(__dirname, 'build', 'd2tp.node');
  const packaged = path.join(__dirname, 'prebuilds', `${process.platform}-${process.arch}`, 'd2tp.node');
  return fs.existsSync(built) || !fs.existsSync(packaged) ? built : packaged;
}

function load(file) {
  try {
    return require(file);
  } catch (error) {
    error.message += '\nbuild.sh makes the binding, of which $D2TP_BINDING may name another';
    throw error;
  }
}

const POLICIES = ['free-only', 'free-first', 'balanced', 'fast', 'any'];
const IF_LATE = ['cell', 'wait', 'fail'];
const UNITS = ['bytes', 'ms'];
const PERSIST = ['no', 'written', 'open'];
const STATES = ['idle', 'connecting', 'connected', 'over'];
const REASONS = [null, 'no-path', 'path-cost'];
const COSTS = ['free', 'metered', 'roaming'];
const PATH_STATES = ['opening', 'works', 'silent'];

/** That nothing is left over. */
function none(others) {
  for (const name of Object.keys(others)) throw new TypeError(`there is no option ${name} here`);
}

/** Words to numbers. */
function numbers({ deadline, size, policy, budget, priority, ifLate, persist, buffer, ...others }) {
  none(others);
  const all = { deadline, size, budget, priority };
  if (persist !== undefined) all.persist = PERSIST.indexOf(persist);
  if (policy !== undefined) all.policy = POLICIES.indexOf(policy);
  if (ifLate !== undefined) all.ifLate = IF_LATE.indexOf(ifLate);
  const said = { policy, ifLate, persist };
  for (const [name, value] of Object.entries(all)) {
    if (value === undefined) delete all[name];
    else if (!(Number.isSafeInteger(value) && value >= 0)) {
      throw new RangeError(`${name}: ${name in said ? said[name] : value} is no value of it`);
    }
  }
  if (buffer !== undefined) {
    const { low, high, unit = 'bytes', rate = 0, ...more } = buffer;
    none(more);
    all.buffer = [low, high, UNITS.indexOf(unit), rate];
    if (!all.buffer.every((value) => Number.isSafeInteger(value) && value >= 0)) throw new RangeError('buffer');
  }
  return all;
}

/** A connection; what only D2TP knows of it beside what a net.Socket does. */
class Socket extends net.Socket {
  #fd;
  #attempt = null;

  /** Of a descriptor that is connected, or of the attempt to connect that `begin` gives. */
  constructor(begin) {
    const isConnecting = typeof begin === 'function';
    const attempt = isConnecting ? begin((error) => this.#made(error)) : null;
    const fd = attempt ? attempt.fd : begin;
    // One that is being made is read once it is.
    super({ fd, readable: true, writable: true, allowHalfOpen: true, manualStart: isConnecting });
    this.#fd = fd;
    this.#attempt = attempt;
    this.connecting = isConnecting;
  }

  #made(error) {
    this.#attempt = null;
    // Given up meanwhile.
    if (this.destroyed) return;
    if (error) {
      this.destroy(error);
      return;
    }
    this.connecting = false;
    this.emit('connect');
    this.emit('ready');
    if (!this.destroyed && !this.isPaused()) this.read(0);
  }

  /** The descriptor, while it is there. */
  #open() {
    if (this.destroyed) throw new Error('the socket is closed');
    return this.#fd;
  }

  /**
   * Changes options: deadline (seconds from now, 0 for none), size (bytes, 0 when not known), policy, budget (bytes that
   * metered networks may carry in all), ifLate, buffer ({ low: 0, high: 0 }: none). Throws an Error with errno, or a
   * RangeError for what is no value at all.
   */
  options(options) {
    binding.set(this.#open(), numbers(options));
  }

  /**
   * A promise that the peer has all that was written. Within so many milliseconds, else it is rejected with code
   * EAGAIN; without them it waits as long as it takes. It holds a thread of Node's pool.
   */
  async flush(within = -1) {
    // Node's own queue comes first.
    if (this.writableLength > 0) {
      await new Promise((done, fail) => {
        this.once('close', () => fail(new Error('the socket is closed')));
        if (this.writableEnded) this.once('finish', done);
        else this.write('', (error) => (error ? fail(error) : done()));
      });
    }
    await binding.flush(this.#open(), Math.min(Math.ceil(within), 2 ** 31 - 1));
  }

  /**
   * A promise of what the connection and its paths do now: state ('idle', 'connecting', 'connected', 'over'), reason why
   * nothing moves (null, 'no-path', 'path-cost'), bytesSent, bytesAcked of those, bytesReceived, bytesAhead of those,
   * slack (milliseconds until the deadline, null without one), and paths: link, cost ('free', 'metered', 'roaming'),
   * state ('opening', 'works', 'silent'), rtt and rttMin (milliseconds), bytesReceived and bytesSent of the whole
   * session, rate (bytes a second lately, null when not known).
   */
  async info() {
    const info = await binding.info(this.#open());
    for (const path of info.paths) {
      path.cost = COSTS[path.cost];
      path.state = PATH_STATES[path.state];
      path.rate = path.rate || null;
    }
    // A later library may know more reasons.
    const reason = REASONS[info.reason] || null;
    return { ...info, state: STATES[info.state], reason, slack: info.slack < 0 ? null : info.slack };
  }

  /**
   * By what a connection of persist: 'open' is opened again, a Buffer of 32 bytes; undefined for others. Whoever is the
   * same user and has it may have the connection: keep it in a file that nobody else may read.
   */
  get token() {
    return binding.token(this.#open());
  }

  /**
   * Ends the connection for everybody, and is a promise of that: one of persist: 'open' is not to be opened again, while
   * `destroy` leaves it so, once this process has ended. What was given to the kernel is still sent.
   */
  async endForGood() {
    const ended = binding.end(this.#open());
    this.destroy();
    await ended;
  }

  _destroy(error, done) {
    // While the descriptor is there: what the kernel says is less than what is known.
    const cause = error ? binding.cause(this.#fd) : '';
    if (error && cause) error.message = cause;
    // It may wait for hours, and nobody wants it any more.
    if (this.#attempt) this.#attempt.abandon();
    this.#attempt = null;
    super._destroy(error, done);
  }
}

/**
 * A Socket that is being connected to a D2TP server ("d2tp://host:port/KEY"), or to any "host:port" through the proxy; 'connect'
 * says that it is, 'error' why not, and `destroy` gives up. Options: deadline (seconds), size (bytes), policy ('free-only',
 * 'free-first', 'balanced', 'fast', 'any'), budget (bytes), priority (0 to 7; higher goes first),
 * ifLate ('cell', 'wait', 'fail'), proxy ("d2tp://host:port/KEY", else $CEDOS_PROX), persist ('no', 'written', 'open': what goes on when this process has
 * ended, by the user's agent; EOPNOTSUPP where none answers), buffer: { low, high, unit: 'bytes' or 'ms', rate }. Another one
 * is a TypeError. Without a network it waits for one.
 */
function createConnection(address, options = {}) {
  const { proxy = '', ...others } = options;
  let to = address;
  if (!address.startsWith('d2tp://')) {
    const at = address.lastIndexOf(':');
    const host = address.slice(0, at).replace(/^\[|\]$/g, '');
    to = `${host.includes(':') ? `[${host}]` : host}:${address.slice(at + 1)}`;
  }
  const values = numbers(others);
  return new Socket((made) => binding.connect(to, proxy, values, made));
}

/** A promise of the same, once it is connected. */
async function connect(address, options = {}) {
  const socket = createConnection(address, options);
  await new Promise((made, failed) => {
    socket.once('error', failed);
    socket.once('connect', () => {
      socket.off('error', failed);
      made();
    });
  });
  return socket;
}

/**
 * A connection of persist: 'open' whose process has ended, by its token: reading goes on with the first byte that its Node
 * had not read, which reads ahead of the program, some 64 kB. Rejected with code ENOENT where none of this token is kept, EBUSY while
 * the process that has it is there, EOPNOTSUPP without an agent, else why the connection broke meanwhile.
 */
async function reopen(token) {
  return new Socket(await binding.reopen(token));
}

/**
 * A D2TP server, made by `createServer`. It lets anybody in, as TCP does. Events: 'listening'; 'connection', with a
 * Socket; 'close'.
 */
class Server extends EventEmitter {
  #listener;

  /** What others connect to: d2tp://host:port/KEY; null while it does not listen. */
  address = null;

  /** At a UDP port, 0 for one of the system's choice, of an address in numbers. Throws with code EADDRINUSE where it is taken. */
  listen(port = 0, host = '0.0.0.0', listening) {
    if (this.listening) throw new Error('it listens already');
    this.#listener = binding.listen(host, port, (fd) => this.#accept(fd));
    this.address = this.#listener.address;
    if (listening) this.once('listening', listening);
    process.nextTick(() => this.emit('listening'));
    return this;
  }

  get listening() {
    return this.address !== null;
  }

  /** Takes no more connections; those that were taken go on, and after them the address is free. */
  close(closed) {
    if (!this.listening) return this;
    this.address = null;
    if (closed) this.once('close', closed);
    this.#listener.stop();
    return this;
  }

  #accept(fd) {
    if (fd < 0) {
      this.emit('close');
      return;
    }
    const far = binding.far(fd);
    const socket = new Socket(fd);
    /** Where it came from: the device may move. */
    socket.far = far;
    this.emit('connection', socket);
  }
}

/**
 * A server whose connections go to the handler, if there is one; `listen` begins. One of HTTP takes them by
 * `httpServer.emit('connection', socket)`.
 */
function createServer(handler) {
  const server = new Server();
  if (handler) server.on('connection', handler);
  return server;
}

/** An http.Agent whose connections are D2TP's, with these options of `connect`. */
function agent(options = {}) {
  const agent = new http.Agent();
  numbers((({ proxy, ...others }) => others)(options));
  agent.createConnection = (to) => {
    const socket = createConnection(`${to.host}:${to.port}`, options);
    // Of connecting, too, as Node's own do.
    if (to.timeout) socket.setTimeout(to.timeout);
    return socket;
  };
  return agent;
}

/**
 * The networks changed in a way that this process may not have seen: every link is tried at once, by an agent too where
 * one carries connections. Calling it often does no harm.
 */
function networkChanged() {
  binding.networkChanged();
}

/**
 * Until the function that it returns is called, the machine is woken for connections of this process that wait for a
 * network, and kept awake while they move. Such locks are counted.
 */
function acquireDlock() {
  let isHeld = true;
  binding.dlock(true);
  return () => {
    if (isHeld) binding.dlock(false);
    isHeld = false;
  };
}

module.exports = { connect, createConnection, reopen, createServer, agent, networkChanged, acquireDlock, Socket, Server };
