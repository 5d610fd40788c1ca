package main

import (
	"encoding/binary"
	"io"
	"log"
	"math"
	"slices"
	"time"
)

// The first messages of a connection find everything cold, and are not counted.
const warmUp = 300 * time.Millisecond

// latency publishes at a steady rate, without waiting for an OK, and notes how long after that each message came. The
// consumer asks for no output buffering: what is measured is the broker, and not how long it was told to wait for more.
func latency() found {
	if *runfor <= warmUp {
		log.Fatalf("--runfor has to be more than %v", warmUp)
	}
	consumer := subscribe(*topic, *channel, mostReady, map[string]any{"output_buffer_size": -1})
	publisher := connectPublisher()
	go func() {
		_, _ = io.Copy(io.Discard, publisher) // errors end the publisher's connection, and so the next write
	}()

	wanted := int(runfor.Seconds() * float64(*rate))
	begin := time.Now()
	go func() {
		wire := request(*topic, make([]byte, *size), 1)
		stamp := wire[len(wire)-*size:]
		var together []byte
		for sent := 0; sent < wanted; {
			due := min(wanted, int(time.Since(begin).Seconds()*float64(*rate)))
			together = together[:0]
			for ; sent < due; sent++ {
				binary.BigEndian.PutUint64(stamp, uint64(time.Since(begin)))
				together = append(together, wire...)
			}
			if len(together) > 0 {
				write(publisher, together)
			}
			time.Sleep(time.Second / time.Duration(*rate))
		}
	}()

	tookMs := make([]float64, 0, wanted)
	delivered := 0
	consume(consumer, func(message []byte) bool {
		delivered++
		sent := time.Duration(binary.BigEndian.Uint64(message[26:]))
		if sent > warmUp {
			tookMs = append(tookMs, float64(time.Since(begin)-sent)/1e6)
		}
		return delivered < wanted
	})
	seconds := time.Since(begin).Seconds()
	slices.Sort(tookMs)
	at := func(part float64) float64 {
		return tookMs[min(len(tookMs)-1, int(math.Floor(part*float64(len(tookMs)))))]
	}
	return found{Messages: delivered, Seconds: seconds, P50Ms: at(0.5), P99Ms: at(0.99), MaxMs: at(1)}
}
