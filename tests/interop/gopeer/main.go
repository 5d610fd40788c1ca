// Gopeer publishes and consumes with go-nsq, the official Go client.
//
//	gopeer pub --addr A --topic T [--batch N] [--defer MS]
//	gopeer sub --addr A --topic T --channel C --n N [--max-in-flight M] [--requeue-first] [--touch] [--hold-first] [--fail-first]
//	gopeer sub --lookupd A --topic T ...
//	gopeer fail-over --addr A,B,... --topic T
//	all: [--tls --ca FILE [--cert FILE --key FILE]] [--snappy | --deflate] [--auth SECRET]
//
// README.md beside this folder says what each flag means; all peers take the same ones.
package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"flag"
	"io"
	"log"
	"os"
	"sync/atomic"
	"time"

	"github.com/nsqio/go-nsq"
)

var (
	flags       = flag.NewFlagSet("gopeer", flag.ExitOnError)
	addr        = flags.String("addr", "", "`host:port` of the broker")
	lookupd     = flags.String("lookupd", "", "`host:port` of a discovery service to ask for brokers, instead of --addr (sub)")
	topic       = flags.String("topic", "", "topic")
	channel     = flags.String("channel", "", "channel (sub)")
	batch       = flags.Int("batch", 1, "messages per MPUB; 1 is PUB (pub)")
	deferMs     = flags.Int("defer", 0, "milliseconds to defer each message; 0 is not at all (pub)")
	count       = flags.Int("n", 0, "finish this many messages, then stop (sub)")
	maxInFlight = flags.Int("max-in-flight", 50, "highest ready count (sub)")
	requeue     = flags.Bool("requeue-first", false, "requeue the first delivery of each message (sub)")
	touch       = flags.Bool("touch", false, "touch each message before it is finished (sub)")
	hold        = flags.Bool("hold-first", false, "keep the first message in flight until stdin ends (sub)")
	fail        = flags.Bool("fail-first", false, "fail the first delivery of each message, and so back off (sub)")
	useTLS      = flags.Bool("tls", false, "use TLS")
	ca          = flags.String("ca", "", "PEM `file` of the authority that signed the broker's certificate")
	cert        = flags.String("cert", "", "PEM `file` of a certificate of our own")
	key         = flags.String("key", "", "PEM `file` of its key")
	useSnappy   = flags.Bool("snappy", false, "compress with snappy")
	useDeflate  = flags.Bool("deflate", false, "compress with deflate")
	secret      = flags.String("auth", "", "secret to authenticate with")
	timeout     = flags.Float64("timeout", 30, "seconds after which to give up")
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("gopeer: ")
	if len(os.Args) < 2 {
		log.Fatal("usage: gopeer pub|sub|fail-over ...")
	}
	_ = flags.Parse(os.Args[2:])
	time.AfterFunc(time.Duration(*timeout*float64(time.Second)), func() {
		log.Fatalf("not done after %g s", *timeout)
	})
	switch os.Args[1] {
	case "pub":
		pub()
	case "sub":
		sub()
	case "fail-over":
		failOver()
	default:
		log.Fatalf("no such command: %s", os.Args[1])
	}
}

// stopping says that the connection is being closed: with compression, go-nsq logs that as an error.
var stopping atomic.Bool

// fatal ends the program at the first line go-nsq logs as an error: an error frame, a lost connection.
type fatal struct{}

func (fatal) Output(_ int, line string) error {
	if !stopping.Load() {
		log.Fatal(line)
	}
	return nil
}

// connection returns the configuration of a connection.
func connection() *nsq.Config {
	config := nsq.NewConfig()
	config.TlsV1 = *useTLS
	config.Snappy = *useSnappy
	config.Deflate = *useDeflate
	config.AuthSecret = *secret
	if *useTLS {
		pem, err := os.ReadFile(*ca)
		check(err)
		config.TlsConfig = &tls.Config{RootCAs: x509.NewCertPool()}
		config.TlsConfig.RootCAs.AppendCertsFromPEM(pem)
		if *cert != "" {
			pair, err := tls.LoadX509KeyPair(*cert, *key)
			check(err)
			config.TlsConfig.Certificates = []tls.Certificate{pair}
		}
	}
	return config
}

// pub sends everything before it waits for the first reply.
func pub() {
	bodies := readBodies(os.Stdin)
	producer, err := nsq.NewProducer(*addr, connection())
	check(err)
	producer.SetLogger(fatal{}, nsq.LogLevelError)

	replies := make(chan *nsq.ProducerTransaction, len(bodies))
	sent := 0
	for len(bodies) > 0 {
		n := min(*batch, len(bodies))
		switch {
		case *deferMs > 0:
			n = 1
			err = producer.DeferredPublishAsync(*topic, time.Duration(*deferMs)*time.Millisecond, bodies[0], replies)
		case *batch > 1:
			err = producer.MultiPublishAsync(*topic, bodies[:n], replies)
		default:
			err = producer.PublishAsync(*topic, bodies[0], replies)
		}
		check(err)
		bodies = bodies[n:]
		sent++
	}
	for ; sent > 0; sent-- {
		check((<-replies).Error)
	}
	stopping.Store(true)
	producer.Stop()
}

func sub() {
	config := connection()
	config.MaxInFlight = *maxInFlight
	config.MaxAttempts = 0
	config.DefaultRequeueDelay = 0
	config.BackoffMultiplier = 100 * time.Millisecond
	config.MaxBackoffDuration = time.Second
	config.LookupdPollInterval = 100 * time.Millisecond
	consumer, err := nsq.NewConsumer(*topic, *channel, config)
	check(err)
	consumer.SetLogger(fatal{}, nsq.LogLevelError)

	out := json.NewEncoder(os.Stdout)
	finished := 0
	consumer.AddHandler(nsq.HandlerFunc(func(message *nsq.Message) error {
		if *requeue && message.Attempts == 1 {
			message.RequeueWithoutBackoff(0)
			return nil
		}
		if *fail && message.Attempts == 1 {
			message.Requeue(-1) // what go-nsq does for a handler that returns an error, but for the log
			return nil
		}
		check(out.Encode(map[string]any{"body": message.Body, "attempts": message.Attempts})) // []byte becomes base64
		if *hold && finished == 0 {
			_, err := io.Copy(io.Discard, os.Stdin)
			check(err)
		}
		if *touch {
			message.Touch()
		}
		finished++
		if finished == *count {
			stopping.Store(true)
			consumer.Stop() // before the last FIN, which would make room for another message
		}
		return nil
	}))
	if *lookupd != "" {
		check(consumer.ConnectToNSQLookupd(*lookupd))
	} else {
		check(consumer.ConnectToNSQD(*addr))
	}
	<-consumer.StopChan
	if finished != *count {
		log.Fatalf("finished %d messages instead of %d", finished, *count)
	}
}

func readBodies(r io.Reader) [][]byte {
	var bodies [][]byte
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		body, err := base64.StdEncoding.DecodeString(lines.Text())
		check(err)
		bodies = append(bodies, body)
	}
	check(lines.Err())
	return bodies
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
