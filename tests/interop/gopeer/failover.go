package main

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"os"
	"strings"
	"time"

	"github.com/nsqio/go-nsq"
)

type silent struct{}

func (silent) Output(int, string) error { return nil }

// failOver publishes each message until a broker has accepted it, with a Producer for each broker: go-nsq's has only
// one. It stays with a broker until a publish fails. It prints the failures of each message.
func failOver() {
	var producers []*nsq.Producer
	for _, address := range strings.Split(*addr, ",") {
		producer, err := nsq.NewProducer(address, connection())
		check(err)
		producer.SetLogger(silent{}, nsq.LogLevelError)
		check(producer.Ping())
		producers = append(producers, producer)
	}
	out := json.NewEncoder(os.Stdout)
	current := 0
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		body, err := base64.StdEncoding.DecodeString(lines.Text())
		check(err)
		failures := []string{}
		for {
			err := producers[current].Publish(*topic, body)
			if err == nil {
				break
			}
			failures = append(failures, err.Error())
			current = (current + 1) % len(producers)
			if len(failures)%len(producers) == 0 {
				time.Sleep(50 * time.Millisecond) // no broker accepts it at the moment
			}
		}
		check(out.Encode(map[string]any{"failures": failures}))
	}
}
