// Peers publishes to this broker and to replicated servers of other projects, each through a Go client library.
//
//	peers nsq   --addr A          NSQ's protocol, PUB
//	peers nats  --addr A,B,C      NATS JetStream: a stream with a copy on each server
//	peers redis --addr A          Redis: XADD, then WAIT for one replica
//	peers etcd  --addr A,B,C      etcd: a put of a new key
//
// Each connection sends one message at a time and waits until it is acknowledged. Requests go to the leader. The result
// goes to standard output, as one line of JSON.
package main

import (
	"encoding/json"
	"flag"
	"log"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	flags       = flag.NewFlagSet("peers", flag.ExitOnError)
	addr        = flags.String("addr", "", "`host:port` of each server, separated by commas")
	connections = flags.Int("connections", 1, "connections that publish")
	size        = flags.Int("size", 200, "bytes of a message")
	runfor      = flags.Duration("runfor", 2*time.Second, "how long to publish")
	timeout     = flags.Duration("timeout", 2*time.Minute, "when to give up")
)

const topic = "bench"

type found struct {
	Messages int     `json:"messages"`
	Seconds  float64 `json:"seconds"`
	P50Ms    float64 `json:"p50_ms"`
	P99Ms    float64 `json:"p99_ms"`
}

// prepare is called once with the addresses. What it returns opens a connection that publishes.
type prepare func(addresses []string) func(n int, body []byte) func()

func main() {
	log.SetFlags(0)
	log.SetPrefix("peers: ")
	commands := map[string]prepare{"nsq": toNSQ, "nats": toNATS, "redis": toRedis, "etcd": toEtcd}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		log.Fatal("usage: peers nsq|nats|redis|etcd --addr ...")
	}
	check(flags.Parse(os.Args[2:]))
	time.AfterFunc(*timeout, func() { log.Fatalf("not done after %v", *timeout) })
	open := commands[os.Args[1]](strings.Split(*addr, ","))
	publishers := make([]func(), *connections)
	for n := range publishers {
		publishers[n] = open(n, make([]byte, *size))
		publishers[n]() // some libraries connect now
	}
	check(json.NewEncoder(os.Stdout).Encode(publish(publishers)))
}

func publish(publishers []func()) found {
	var over atomic.Bool
	var all sync.WaitGroup
	tookMs := make([][]float64, len(publishers))
	begin := time.Now()
	time.AfterFunc(*runfor, func() { over.Store(true) })
	for n, publishOne := range publishers {
		all.Go(func() {
			for last := time.Now(); !over.Load(); {
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
	return found{len(sorted), seconds, at(0.5), at(0.99)}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
