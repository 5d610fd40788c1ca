package main

import (
	"encoding/binary"
	"io"
	"log"
	"math"
	"net"
	"slices"
	"sync"
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
	return withLatency(found{Messages: delivered, Seconds: time.Since(begin).Seconds()}, tookMs)
}

// oks publishes at a steady rate over all connections, each of which waits for its OK, and notes how long that took. If
// an OK comes so late that the next message is due already, that one's time counts from when it was due.
func oks() found {
	if *runfor <= warmUp {
		log.Fatalf("--runfor has to be more than %v", warmUp)
	}
	interval := time.Duration(float64(time.Second) * float64(*connections) / float64(*rate))
	wire := request(*topic, make([]byte, *size), 1)
	publishers := make([]net.Conn, *connections)
	for n := range publishers {
		publishers[n] = connectPublisher()
	}
	var all sync.WaitGroup
	took := make([][]float64, *connections)
	begin := time.Now()
	for n, conn := range publishers {
		all.Add(1)
		go func(n int, conn net.Conn) {
			defer all.Done()
			for due := interval * time.Duration(n) / time.Duration(*connections); due < *runfor; due += interval {
				from := due
				if now := time.Since(begin); now < due {
					time.Sleep(due - now)
					from = time.Since(begin)
				}
				write(conn, wire)
				expectOK(conn)
				if due > warmUp {
					took[n] = append(took[n], float64(time.Since(begin)-from)/1e6)
				}
			}
		}(n, conn)
	}
	all.Wait()
	var tookMs []float64
	for _, some := range took {
		tookMs = append(tookMs, some...)
	}
	return withLatency(found{Messages: len(tookMs), Seconds: (time.Since(begin) - warmUp).Seconds()}, tookMs)
}

func withLatency(result found, tookMs []float64) found {
	slices.Sort(tookMs)
	at := func(part float64) float64 {
		return tookMs[min(len(tookMs)-1, int(math.Floor(part*float64(len(tookMs)))))]
	}
	result.P50Ms, result.P99Ms, result.MaxMs = at(0.5), at(0.99), at(1)
	return result
}
