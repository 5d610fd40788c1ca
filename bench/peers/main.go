// Peers publishes to this broker and to servers of other projects, and consumes from them, each through a Go client
// library.
//
//	peers nsq    --addr A          NSQ's protocol: PUB, MPUB, FIN
//	peers nats   --addr A,B,C      NATS JetStream: a stream with a copy on each server, atomic batches; nats-async: others
//	peers redis  --addr A,B        Redis: XADD, then WAIT for the servers after the first one; XREADGROUP and XACK
//	peers rabbit --addr A          RabbitMQ: a quorum queue, publisher confirms
//	peers stream --addr A,B        RabbitMQ: a stream, published to through its own protocol, consumed through AMQP
//	peers etcd   --addr A,B,C      etcd: a put of a new key; it only publishes
//
// Each connection sends one message, or one batch, at a time and waits until it is acknowledged. Requests go to the
// leader. The result goes to standard output, as one line of JSON.
package main

import (
	"encoding/json"
	"flag"
	"log"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

var (
	flags       = flag.NewFlagSet("peers", flag.ExitOnError)
	addr        = flags.String("addr", "", "`host:port` of each server, separated by commas")
	job         = flags.String("job", "pub", "pub; fill: publish --count messages; consume: --count messages of a backlog; through: publish and consume")
	topic       = flags.String("topic", "bench", "topic, stream or queue; created if there is none")
	connections = flags.Int("connections", 1, "connections that publish")
	batch       = flags.Int("batch", 1, "messages that are published together")
	consumers   = flags.Int("consumers", 1, "connections that consume")
	count       = flags.Int("count", 0, "messages of fill and consume")
	size        = flags.Int("size", 200, "bytes of a message")
	runfor      = flags.Duration("runfor", 2*time.Second, "how long to publish")
	timeout     = flags.Duration("timeout", 2*time.Minute, "when to give up")
)

const (
	groupName = "bench"
	// window is how many messages a consumer may have in flight: NSQ's maximum.
	window = 2500
)

type found struct {
	Messages  int     `json:"messages"`
	Delivered int     `json:"delivered"`
	Seconds   float64 `json:"seconds"`
	P50Ms     float64 `json:"p50_ms"`
	P99Ms     float64 `json:"p99_ms"`
	// CPUSeconds is the processor time of this program while it measured.
	CPUSeconds float64 `json:"cpu_seconds"`
}

// system is a server with a topic, through its client library. consumer and group are nil if it only publishes.
type system struct {
	// group creates the group of consumers, before anything is published.
	group func()
	// publisher opens a connection. What it returns publishes a batch and waits until all of it is acknowledged.
	publisher func(n int, batch int, body []byte) func()
	// consumer opens a connection, and calls a function with the number of messages that it has acknowledged.
	consumer func(n int, acknowledged func(messages int))
}

var systems = map[string]func(addresses []string) system{
	"nsq": newNSQ, "nats": newNATS, "nats-async": newAsyncNATS, "redis": newRedis, "rabbit": newRabbit, "stream": newStream, "etcd": newEtcd,
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("peers: ")
	if len(os.Args) < 2 || systems[os.Args[1]] == nil {
		log.Fatalf("usage: peers %s --addr ...", strings.Join(slices.Sorted(maps.Keys(systems)), "|"))
	}
	check(flags.Parse(os.Args[2:]))
	time.AfterFunc(*timeout, func() { log.Fatalf("not done after %v", *timeout) })
	using := systems[os.Args[1]](strings.Split(*addr, ","))
	if *job != "pub" {
		if using.group == nil {
			log.Fatalf("%s cannot consume", os.Args[1])
		}
		using.group()
	}
	jobs := map[string]func(system) found{
		"pub":     func(s system) found { return publish(opened(s, 1), *runfor, 0) },
		"fill":    func(s system) found { return publish(opened(s, 0), *timeout, *count) },
		"consume": consume,
		"through": through,
	}
	if jobs[*job] == nil {
		log.Fatalf("--job: there is no %s", *job)
	}
	check(json.NewEncoder(os.Stdout).Encode(jobs[*job](using)))
}

// opened returns the publishers, each of which has published some batches already: some libraries connect then.
func opened(using system, batches int) []func() {
	publishers := make([]func(), *connections)
	var all sync.WaitGroup
	for n := range publishers {
		publishers[n] = using.publisher(n, *batch, make([]byte, *size))
		all.Go(func() {
			for range batches {
				publishers[n]()
			}
		})
	}
	all.Wait()
	return publishers
}

// publish publishes for a while, or so many messages if count is not 0.
func publish(publishers []func(), during time.Duration, count int) found {
	var over atomic.Bool
	var all sync.WaitGroup
	var taken atomic.Int64
	tookMs := make([][]float64, len(publishers))
	begin, used := time.Now(), cpuSeconds()
	time.AfterFunc(during, func() { over.Store(true) })
	for n, publishOne := range publishers {
		all.Go(func() {
			for last := time.Now(); !over.Load() && (count == 0 || taken.Add(int64(*batch)) <= int64(count)); {
				publishOne()
				now := time.Now()
				tookMs[n] = append(tookMs[n], float64(now.Sub(last))/1e6)
				last = now
			}
		})
	}
	all.Wait()
	seconds := time.Since(begin).Seconds()
	sorted := slices.Sorted(slices.Values(slices.Concat(tookMs...)))
	if len(sorted) == 0 {
		log.Fatal("nothing was acknowledged in time")
	}
	at := func(part float64) float64 { return sorted[int(part*float64(len(sorted)))] }
	return found{
		Messages: len(sorted) * *batch, Seconds: seconds, P50Ms: at(0.5), P99Ms: at(0.99), CPUSeconds: cpuSeconds() - used,
	}
}

// consume consumes until count messages are acknowledged. The time starts before the consumers do.
func consume(using system) found {
	var acknowledged atomic.Int64
	done := make(chan struct{})
	begin, used := time.Now(), cpuSeconds()
	for n := range *consumers {
		using.consumer(n, func(messages int) {
			if now := acknowledged.Add(int64(messages)); now >= int64(*count) && now-int64(messages) < int64(*count) {
				close(done)
			}
		})
	}
	<-done
	messages := int(acknowledged.Load())
	return found{
		Messages: messages, Delivered: messages, Seconds: time.Since(begin).Seconds(), CPUSeconds: cpuSeconds() - used,
	}
}

func through(using system) found {
	var acknowledged atomic.Int64
	publishers := opened(using, 1)
	for n := range *consumers {
		using.consumer(n, func(messages int) { acknowledged.Add(int64(messages)) })
	}
	for before := time.Now(); acknowledged.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Since(before) > *timeout/2 {
			log.Fatal("nothing was delivered in time")
		}
	}
	before := acknowledged.Load()
	all := publish(publishers, *runfor, 0)
	all.Delivered = int(acknowledged.Load() - before)
	return all
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
