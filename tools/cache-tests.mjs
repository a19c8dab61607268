// Runs the public test suite for HTTP caches (github.com/http-tests/cache-tests) against `cedos prox --tcp-listen`,
// and prints the counts and each required or optimal test that does not pass.
//
//   node tools/cache-tests.mjs SUITE CEDOS [--json FILE]
//
// SUITE: a checkout of the suite in which `npm install` was run. CEDOS: the program. Exit code 0 if the marks are
// kept: 156 required tests and 80 optimal ones.
//
// The suite's client speaks to an origin, D2Prox is a proxy: between the two, this program turns the path of each
// request line into a URL. Nothing else is touched.
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import net from 'node:net'
import { tmpdir } from 'node:os'
import path from 'node:path'

const REQUIRED_MIN = 156
const OPTIMAL_MIN = 80
const LINE_END = Buffer.from('\r\n')

const [suite, cedos] = process.argv.slice(2)
const jsonAt = process.argv.indexOf('--json')
if (!suite || !cedos) {
  console.error('usage: node tools/cache-tests.mjs SUITE CEDOS [--json FILE]')
  process.exit(2)
}

const running = []
const scratch = mkdtempSync(path.join(tmpdir(), 'cache-tests-'))
process.on('exit', () => {
  running.forEach(child => child.kill())
  rmSync(scratch, { recursive: true, force: true })
})

const freePort = async () => {
  const server = net.createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address()
  server.close()
  await once(server, 'close')
  return port
}

// Resolves once something listens at the port.
const listens = async port => {
  for (;;) {
    const socket = net.connect(port, '127.0.0.1')
    const answer = await Promise.race([
      once(socket, 'connect').then(() => true, () => false),
      once(socket, 'error').then(() => false)
    ])
    socket.destroy()
    if (answer) return
    // Nothing tells when another program listens.
    await new Promise(resolve => setTimeout(resolve, 100))
  }
}

const start = (program, args, options) => {
  const child = spawn(program, args, { stdio: ['ignore', 'ignore', 'inherit'], ...options })
  running.push(child)
  return child
}

const originPort = await freePort()
const proxyPort = await freePort()
start('node', ['test-engine/server/server.mjs'], {
  cwd: suite,
  env: {
    ...process.env,
    npm_config_protocol: 'http',
    npm_config_port: String(originPort),
    npm_config_pidfile: path.join(scratch, 'server.pid')
  }
})
start(cedos, [
  'prox', '--listen', '127.0.0.1:0', '--allow-private',
  '--tcp-listen', `127.0.0.1:${proxyPort}`, '--allow-address', '127.0.0.0/8'
], { env: { ...process.env, RUST_LOG: process.env.RUST_LOG ?? 'error', TMPDIR: scratch } })
await Promise.all([listens(originPort), listens(proxyPort)])

const adapter = net.createServer({ allowHalfOpen: true }, client => {
  const proxy = net.connect({ port: proxyPort, host: '127.0.0.1', allowHalfOpen: true })
  client.on('error', () => proxy.destroy())
  proxy.on('error', () => client.destroy())
  let first = Buffer.alloc(0)
  const onData = bytes => {
    first = Buffer.concat([first, bytes])
    const end = first.indexOf(LINE_END)
    if (end < 0) return
    client.off('data', onData)
    const line = first.subarray(0, end).toString('latin1')
    const asked = line.replace(' ', ` http://127.0.0.1:${originPort}`)
    proxy.write(Buffer.concat([Buffer.from(asked, 'latin1'), first.subarray(end)]))
    client.pipe(proxy)
  }
  client.on('data', onData)
  proxy.pipe(client)
}).listen(0, '127.0.0.1')
await once(adapter, 'listening')

const { default: tests } = await import(path.resolve(suite, 'tests/index.mjs'))
const { runTests, getResults } = await import(path.resolve(suite, 'test-engine/client/runner.mjs'))
const { determineTestResult } = await import(path.resolve(suite, 'test-engine/lib/results.mjs'))
const only = process.env.ONLY
const chosen = only
  ? tests.map(set => ({ ...set, tests: set.tests.filter(test => test.id === only) }))
  : tests
if (only) chosen.forEach(set => set.tests.forEach(test => { test.dump = true }))
await runTests(chosen, false, `http://127.0.0.1:${adapter.address().port}`)

const results = getResults()
const counts = {}
const missed = []
for (const set of tests) {
  for (const test of set.tests) {
    if (test.browser_only || !(test.id in results)) continue
    const kind = test.kind ?? 'required'
    const count = (counts[kind] ??= { of: 0, passed: 0, passed_with_what_they_depend_on: 0 })
    count.of += 1
    if (results[test.id] === true) count.passed += 1
    const symbol = determineTestResult(tests, test.id, results)[2]
    if (symbol === '✅' || symbol === 'Y') count.passed_with_what_they_depend_on += 1
    if (kind !== 'check' && results[test.id] !== true) missed.push({ kind, id: test.id, said: results[test.id][1] })
  }
}
for (const { kind, id, said } of missed) console.log(`${kind} ${id}: ${said}`)
console.log(JSON.stringify(counts))
if (jsonAt > 0) writeFileSync(process.argv[jsonAt + 1], JSON.stringify({ counts, missed }, null, 2) + '\n')
const isKept = counts.required?.passed >= REQUIRED_MIN && counts.optimal?.passed >= OPTIMAL_MIN
process.exit(isKept ? 0 : 1)
