// Gonsqload publishes and consumes in the loops that go-nsq's users write, for the benchmarks.
//
//	gonsqload publish --addr A --topic T --goroutines N --batch M      Publish or MultiPublish, each waits for its OK
//	gonsqload async   --addr A --topic T --under-way N                 PublishAsync, so many without an answer yet
//	gonsqload consume --addr A --topic T --channel C --handlers N --max-in-flight M
//
// All goroutines share one Producer, as go-nsq recommends. Figures go to standard output, as one line of JSON.
package main

import (
	"encoding/json"
	"flag"
	"log"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nsqio/go-nsq"
)

var (
	flags       = flag.NewFlagSet("gonsqload", flag.ExitOnError)
	addr        = flags.String("addr", "", "`host:port` of the broker")
	topic       = flags.String("topic", "sub_bench", "topic")
	channel     = flags.String("channel", "ch", "channel (consume)")
	size        = flags.Int("size", 200, "bytes of a message (publish, async)")
	runfor      = flags.Duration("runfor", 2*time.Second, "how long")
	goroutines  = flags.Int("goroutines", 16, "goroutines that publish (publish)")
	batch       = flags.Int("batch", 1, "messages of one call; 1 is Publish, more is MultiPublish (publish)")
	underWay    = flags.Int("under-way", 1000, "messages without an answer yet (async)")
	handlers    = flags.Int("handlers", 1, "concurrent handlers (consume)")
	maxInFlight = flags.Int("max-in-flight", nsq.NewConfig().MaxInFlight, "MaxInFlight; the default is go-nsq's (consume)")
	timeout     = flags.Duration("timeout", 2*time.Minute, "when to give up")
)

// found is told in the end. CPUSeconds are this program's own.
type found struct {
	Messages   int64   `json:"messages"`
	Seconds    float64 `json:"seconds"`
	CPUSeconds float64 `json:"cpu_seconds"`
}

// fatal ends the program at the first line that go-nsq logs as an error: an error frame, a lost connection.
type fatal struct{}

func (fatal) Output(_ int, line string) error {
	log.Fatal(line)
	return nil
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("gonsqload: ")
	commands := map[string]func() found{"publish": publish, "async": async, "consume": consume}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		log.Fatal("usage: gonsqload publish|async|consume ...")
	}
	_ = flags.Parse(os.Args[2:])
	time.AfterFunc(*timeout, func() { log.Fatalf("not done after %v", *timeout) })
	result := commands[os.Args[1]]()
	var usage syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	result.CPUSeconds = float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
	check(json.NewEncoder(os.Stdout).Encode(result))
}

func newProducer() *nsq.Producer {
	producer, err := nsq.NewProducer(*addr, nsq.NewConfig())
	check(err)
	producer.SetLogger(fatal{}, nsq.LogLevelError)
	check(producer.Ping())
	return producer
}

func publish() found {
	producer := newProducer()
	bodies := make([][]byte, *batch)
	for i := range bodies {
		bodies[i] = make([]byte, *size)
	}
	var messages atomic.Int64
	var all sync.WaitGroup
	begin := time.Now()
	for n := 0; n < *goroutines; n++ {
		all.Add(1)
		go func() {
			defer all.Done()
			for own := 0; own == 0 || time.Since(begin) < *runfor; own++ {
				if *batch == 1 {
					check(producer.Publish(*topic, bodies[0]))
				} else {
					check(producer.MultiPublish(*topic, bodies))
				}
				messages.Add(int64(*batch))
			}
		}()
	}
	all.Wait()
	return found{Messages: messages.Load(), Seconds: time.Since(begin).Seconds()}
}

func async() found {
	producer := newProducer()
	body := make([]byte, *size)
	answers := make(chan *nsq.ProducerTransaction, *underWay)
	var messages int64
	begin := time.Now()
	for ; messages == 0 || time.Since(begin) < *runfor; messages++ {
		if messages >= int64(*underWay) {
			check((<-answers).Error)
		}
		check(producer.PublishAsync(*topic, body, answers))
	}
	for left := min(messages, int64(*underWay)); left > 0; left-- {
		check((<-answers).Error)
	}
	return found{Messages: messages, Seconds: time.Since(begin).Seconds()}
}

// consume counts from the first message on.
func consume() found {
	config := nsq.NewConfig()
	config.MaxInFlight = *maxInFlight
	consumer, err := nsq.NewConsumer(*topic, *channel, config)
	check(err)
	consumer.SetLogger(fatal{}, nsq.LogLevelError)
	var messages atomic.Int64
	first := make(chan struct{})
	consumer.AddConcurrentHandlers(nsq.HandlerFunc(func(*nsq.Message) error {
		if messages.Add(1) == 1 {
			close(first)
		}
		return nil
	}), *handlers)
	check(consumer.ConnectToNSQD(*addr))
	<-first
	begin := time.Now()
	time.Sleep(*runfor)
	return found{Messages: messages.Load(), Seconds: time.Since(begin).Seconds()}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
