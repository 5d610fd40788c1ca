// Goload is the load of those benchmarks for which NSQ's bench_writer and bench_reader have no workload.
//
//	goload pub      --addr A --topic T --connections N --batch M            each connection waits for its OK
//	goload http     --addr A --topic T --connections N --batch M            the same, over HTTP
//	goload through  --addr A --topic T --topics N --channels N --count N    publish and consume until all is delivered
//	goload mixed    --addr A --topic T --topics N --channels N --count N    requests, sizes and answers of all kinds at once
//	goload latency  --addr A --topic T --rate N                             from publish to delivery, at a steady rate
//	goload oks      --addr A --topic T --rate N --connections N             from publish to OK, at a steady rate
//
// What it found goes to standard output, as one line of JSON. Requests are built once and sent again and again, and
// replies are looked at no closer than is needed to know that they are good, so that the broker gets most of the machine.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

var (
	flags       = flag.NewFlagSet("goload", flag.ExitOnError)
	addr        = flags.String("addr", "", "`host:port` of the broker; for http, where it serves that")
	topic       = flags.String("topic", "sub_bench", "topic; the first part of their names if there are several")
	connections = flags.Int("connections", 2, "connections that publish")
	size        = flags.Int("size", 200, "bytes of a message")
	batch       = flags.Int("batch", 1, "messages of one request; 1 is PUB, more is MPUB")
	runfor      = flags.Duration("runfor", 2*time.Second, "how long to publish (pub, http, latency, oks)")
	topics      = flags.Int("topics", 1, "topics, which take turns (pub, through, mixed); named TOPIC-0 and so on if several")
	channels    = flags.Int("channels", 1, "channels of each topic (through, mixed); `through` has one consumer for each")
	channel     = flags.String("channel", "ch", "channel; named CHANNEL-0 and so on by `through` and `mixed` if several")
	perChannel  = flags.Int("per-channel", 2, "consumers of a channel (mixed)")
	ready       = flags.Int("ready", 50, "RDY of a consumer (mixed)")
	count       = flags.Int("count", 100000, "messages, over all topics (through, mixed)")
	singles     = flags.Bool("mixed", false, "let a PUB of one message follow every MPUB (through)")
	rate        = flags.Int("rate", 5000, "messages a second (latency, oks)")
	timeout     = flags.Duration("timeout", 2*time.Minute, "when to give up")
)

// leastBufferingMs is how long nsqd may at least be asked to wait for more before it sends; by default the last messages
// would come a quarter of a second late.
const leastBufferingMs = 25

// found is what is told in the end. CPUSeconds are this program's own.
type found struct {
	Messages       int     `json:"messages"`
	Seconds        float64 `json:"seconds"`
	PublishSeconds float64 `json:"publish_seconds,omitempty"`
	Deliveries     int     `json:"deliveries,omitempty"`
	Requeued       int     `json:"requeued,omitempty"`
	Deferred       int     `json:"deferred,omitempty"`
	BodyBytes      int     `json:"body_bytes,omitempty"`
	P50Ms          float64 `json:"p50_ms,omitempty"`
	P99Ms          float64 `json:"p99_ms,omitempty"`
	MaxMs          float64 `json:"max_ms,omitempty"`
	CPUSeconds     float64 `json:"cpu_seconds"`
}

// whatIsMissing is told if the time is over.
var whatIsMissing = func() string { return "" }

func main() {
	log.SetFlags(0)
	log.SetPrefix("goload: ")
	commands := map[string]func() found{"pub": pub, "http": http, "through": through, "mixed": mixed, "latency": latency, "oks": oks}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		log.Fatal("usage: goload pub|http|through|mixed|latency|oks ...")
	}
	_ = flags.Parse(os.Args[2:])
	time.AfterFunc(*timeout, func() { log.Fatalf("not done after %v. %s", *timeout, whatIsMissing()) })
	result := commands[os.Args[1]]()
	var usage syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	result.CPUSeconds = float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
	check(json.NewEncoder(os.Stdout).Encode(result))
}

// pub publishes over TCP.
func pub() found {
	body := make([]byte, *size)
	return publishFor(func(n int) func() {
		conn := connectPublisher()
		requests := make([][]byte, *topics)
		for t := range requests {
			requests[t] = request(topicName(t), body, *batch)
		}
		next := n
		return func() {
			write(conn, requests[next%*topics])
			next++
			expectOK(conn)
		}
	})
}

// http publishes over HTTP.
func http() found {
	path, body := "pub", bytes.Repeat([]byte("x"), *size)
	if *batch > 1 {
		path, body = "mpub", bytes.Repeat(append(body, '\n'), *batch) // a line is a message
	}
	head := fmt.Sprintf("POST /%s?topic=%s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n", path, *topic, *addr, len(body))
	request := append([]byte(head), body...)
	return publishFor(func(int) func() {
		conn := dial()
		replies := newReplies(conn)
		return func() {
			write(conn, request)
			replies.expectOK()
		}
	})
}

// publishFor has connections publish at the same time. It begins when all are there.
func publishFor(open func(n int) func()) found {
	publishers := make([]func(), *connections)
	for n := range publishers {
		publishers[n] = open(n)
	}
	var over atomic.Bool
	var requests atomic.Int64
	begin := time.Now()
	time.AfterFunc(*runfor, func() { over.Store(true) })
	var all sync.WaitGroup
	for _, publish := range publishers {
		all.Add(1)
		go func(publish func()) {
			defer all.Done()
			var own int64
			for own == 0 || !over.Load() {
				publish()
				own++
			}
			requests.Add(own)
		}(publish)
	}
	all.Wait()
	return found{Messages: int(requests.Load()) * *batch, Seconds: time.Since(begin).Seconds()}
}

// through publishes to all topics, and consumes all their channels meanwhile, until every one has delivered everything.
func through() found {
	each := *count / *topics
	var consumers sync.WaitGroup
	for t := 0; t < *topics; t++ {
		for c := 0; c < *channels; c++ {
			conn := subscribe(topicName(t), channelName(c), mostReady, map[string]any{"output_buffer_timeout": leastBufferingMs})
			consumers.Add(1)
			go func() {
				defer consumers.Done()
				delivered := 0
				consume(conn, func(message []byte) bool {
					if message[9] == 1 { // attempts: what comes again is not counted
						delivered++
					}
					return delivered < each
				})
			}()
		}
	}
	body := make([]byte, *size)
	var publishers sync.WaitGroup
	begin := time.Now()
	for p := 0; p < *connections; p++ {
		publishers.Add(1)
		go func(p int) {
			defer publishers.Done()
			publishAll(share(p), each, body)
		}(p)
	}
	publishers.Wait()
	published := time.Since(begin)
	consumers.Wait()
	return found{
		Messages:       each * *topics,
		Seconds:        time.Since(begin).Seconds(),
		PublishSeconds: published.Seconds(),
	}
}

// part is what one connection publishes to a topic: its `of`th part, the `nth` of them.
type part struct {
	topic   string
	number  int // of the topic
	nth, of int
}

// share returns the topics of a connection: topics are spread over the connections, or one is shared by all.
func share(connection int) []part {
	var parts []part
	for t := 0; t < *topics; t++ {
		switch {
		case *topics < *connections:
			parts = append(parts, part{topicName(t), t, connection, *connections})
		case t%*connections == connection:
			parts = append(parts, part{topicName(t), t, 0, 1})
		}
	}
	return parts
}

// publishAll publishes its part of so many messages to each topic; topics take turns.
func publishAll(parts []part, each int, body []byte) {
	conn := connectPublisher()
	left := make([]int, len(parts))
	for i, part := range parts {
		left[i] = each*(part.nth+1)/part.of - each*part.nth/part.of
	}
	batches, ones := make([][]byte, len(parts)), make([][]byte, len(parts))
	for i, part := range parts {
		batches[i], ones[i] = request(part.topic, body, *batch), request(part.topic, body, 1)
	}
	for more := true; more; {
		more = false
		for i, part := range parts {
			for _, n := range turn() {
				n = min(n, left[i])
				switch n {
				case 0:
					continue
				case 1:
					write(conn, ones[i])
				case *batch:
					write(conn, batches[i])
				default:
					write(conn, request(part.topic, body, n))
				}
				expectOK(conn)
				left[i] -= n
			}
			more = more || left[i] > 0
		}
	}
	conn.Close()
}

// turn returns the sizes of the requests to one topic before the next has its turn.
func turn() []int {
	if *singles {
		return []int{*batch, 1}
	}
	return []int{*batch}
}

func topicName(t int) string {
	return numbered(*topic, t, *topics)
}

func channelName(c int) string {
	return numbered(*channel, c, *channels)
}

func numbered(name string, n, of int) string {
	if of == 1 {
		return name
	}
	return fmt.Sprintf("%s-%d", name, n)
}

func write(conn net.Conn, data []byte) {
	_, err := conn.Write(data)
	check(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
