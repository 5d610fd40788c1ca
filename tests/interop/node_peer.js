// Publishes and consumes with nsqjs, the official Node.js client. README.md says what each flag means.
'use strict'

const {once} = require('node:events')
const {readFileSync} = require('node:fs')
const {text} = require('node:stream/consumers')
const {parseArgs} = require('node:util')
const nsq = require('nsqjs')

function fail(reason) {
  console.error(`node_peer: ${reason}`)
  process.exit(1)
}

const {positionals, values: flags} = parseArgs({
  allowPositionals: true,
  options: {
    addr: {type: 'string'},
    topic: {type: 'string'},
    channel: {type: 'string'},
    batch: {type: 'string', default: '1'},
    defer: {type: 'string', default: '0'},
    n: {type: 'string', default: '0'},
    'max-in-flight': {type: 'string', default: '50'},
    'requeue-first': {type: 'boolean', default: false},
    touch: {type: 'boolean', default: false},
    'hold-first': {type: 'boolean', default: false},
    'fail-first': {type: 'boolean', default: false},
    tls: {type: 'boolean', default: false},
    ca: {type: 'string'},
    cert: {type: 'string'},
    key: {type: 'string'},
    snappy: {type: 'boolean', default: false},
    deflate: {type: 'boolean', default: false},
    auth: {type: 'string'},
    timeout: {type: 'string', default: '30'},
  },
})

// What both Writer and Reader take.
const connection = {
  tls: flags.tls,
  snappy: flags.snappy,
  deflate: flags.deflate,
  authSecret: flags.auth ?? null,
  ca: flags.ca ? readFileSync(flags.ca) : null,
  cert: flags.cert ? readFileSync(flags.cert) : null,
  key: flags.key ? readFileSync(flags.key) : null,
}

// Sends everything before it waits for the first reply.
async function pub() {
  const lines = (await text(process.stdin)).split('\n').filter(Boolean)
  const bodies = lines.map((line) => Buffer.from(line, 'base64'))
  const [host, port] = flags.addr.split(':')
  const writer = new nsq.Writer(host, Number(port), connection)
  writer.on('error', fail)
  writer.connect()
  await once(writer, 'ready')

  const replies = []
  const send = (publish) =>
    replies.push(new Promise((resolve) => publish((error) => (error ? fail(error) : resolve()))))
  const batch = Number(flags.batch)
  const deferMs = Number(flags.defer)
  if (deferMs) {
    // The array is needed: deferPublish of nsqjs 0.13 throws for the single body its documentation shows.
    for (const body of bodies) send((done) => writer.deferPublish(flags.topic, [body], deferMs, done))
  } else {
    for (let i = 0; i < bodies.length; i += batch)
      send((done) => writer.publish(flags.topic, bodies.slice(i, i + batch), done))
  }
  await Promise.all(replies)
  writer.close()
}

function sub() {
  const count = Number(flags.n)
  const reader = new nsq.Reader(flags.topic, flags.channel, {
    nsqdTCPAddresses: flags.addr,
    maxInFlight: Number(flags['max-in-flight']),
    maxBackoffDuration: 3, // seconds; the first one is a fortieth of it
    ...connection,
  })
  let taken = 0
  reader.on('error', fail)
  reader.on('nsqd_closed', () => taken < count && fail('connection lost'))
  reader.on('message', async (message) => {
    if (flags['requeue-first'] && message.attempts === 1) {
      message.requeue(0, false)
      return
    }
    if (flags['fail-first'] && message.attempts === 1) {
      message.requeue(0, true)
      return
    }
    taken += 1
    const [first, last] = [taken === 1, taken === count]
    console.log(JSON.stringify({body: message.body.toString('base64'), attempts: message.attempts}))
    if (flags['hold-first'] && first) await text(process.stdin)
    if (flags.touch) message.touch()
    if (last) reader.pause() // before the last FIN, which would make room for another message
    message.finish()
    if (last) setImmediate(() => closeAfterWriting(reader)) // finish() writes at the next tick
  })
  reader.connect()
}

// Closes when the broker has read all that was written. nsqjs's own close() waits for nothing, not even for what is
// still being compressed, and has no public way to wait.
function closeAfterWriting(reader) {
  const [{conn}] = reader.readerRdy.connections
  const receiveData = conn.receiveData
  conn.receiveData = (data) => {
    receiveData.call(conn, data)
    if (data.includes('CLOSE_WAIT')) reader.close()
  }
  conn.outWriter.write('CLS\n')
}

setTimeout(() => fail(`not done after ${flags.timeout} s`), Number(flags.timeout) * 1000).unref()
const command = {pub, sub}[positionals[0]]
if (command) command()
else fail('usage: node_peer.js pub|sub ...')
