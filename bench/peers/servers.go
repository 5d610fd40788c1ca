package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nsqio/go-nsq"
	"github.com/redis/go-redis/v9"
	"github.com/synadia-io/orbit.go/jetstreamext"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const patience = 30 * time.Second

// ------------------------------------------------------------------------------------------ NSQ

func newNSQ(addresses []string) system {
	group := func() {
		conn, err := net.Dial("tcp", addresses[0])
		check(err)
		_, err = fmt.Fprintf(conn, "  V2SUB %s %s\n", *topic, groupName)
		check(err)
		answer := make([]byte, 10) // length, type and OK
		_, err = io.ReadFull(conn, answer)
		check(err)
		check(conn.Close())
	}
	publisher := func(_ int, batch int, body []byte) func() {
		producer, err := nsq.NewProducer(addresses[0], nsq.NewConfig())
		check(err)
		producer.SetLoggerLevel(nsq.LogLevelError)
		if batch == 1 {
			return func() { check(producer.Publish(*topic, body)) }
		}
		bodies := repeated(body, batch)
		return func() { check(producer.MultiPublish(*topic, bodies)) }
	}
	consumer := func(_ int, acknowledged func(int)) {
		config := nsq.NewConfig()
		config.MaxInFlight = window
		consumer, err := nsq.NewConsumer(*topic, groupName, config)
		check(err)
		consumer.SetLoggerLevel(nsq.LogLevelError)
		consumer.AddHandler(nsq.HandlerFunc(func(*nsq.Message) error { acknowledged(1); return nil }))
		check(consumer.ConnectToNSQD(addresses[0]))
	}
	return system{group, publisher, consumer}
}

func repeated[T any](one T, times int) []T {
	all := make([]T, times)
	for n := range all {
		all[n] = one
	}
	return all
}

// ------------------------------------------------------------------------------------------ NATS JetStream

// newNATS publishes batches atomically. NATS syncs each of these, so they are the faster way if every OK is synced.
func newNATS(addresses []string) system {
	return natsSystem(addresses, func(stream jetstream.JetStream, batch int, body []byte) {
		messages := make([]*nats.Msg, batch)
		for n := range messages {
			messages[n] = &nats.Msg{Subject: *topic, Data: body, Header: nats.Header{}}
		}
		_, err := jetstreamext.PublishMsgBatch(context.Background(), stream, messages)
		check(err)
	})
}

// newAsyncNATS publishes a batch as single messages, and then waits until all are acknowledged.
func newAsyncNATS(addresses []string) system {
	return natsSystem(addresses, func(stream jetstream.JetStream, batch int, body []byte) {
		acks := make([]jetstream.PubAckFuture, batch)
		for n := range acks {
			var err error
			acks[n], err = stream.PublishAsync(*topic, body)
			check(err)
		}
		for _, ack := range acks {
			select {
			case <-ack.Ok():
			case err := <-ack.Err():
				log.Fatal(err)
			}
		}
	})
}

func natsSystem(addresses []string, publishBatch func(stream jetstream.JetStream, batch int, body []byte)) system {
	leader := leaderOfStream(addresses)
	group := func() {
		_, err := jetStream(leader).CreateOrUpdateConsumer(context.Background(), *topic, jetstream.ConsumerConfig{
			Durable: groupName, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: window,
		})
		check(err)
	}
	publisher := func(_ int, batch int, body []byte) func() {
		stream := jetStream(leader)
		if batch == 1 {
			return func() {
				_, err := stream.Publish(context.Background(), *topic, body)
				check(err)
			}
		}
		return func() { publishBatch(stream, batch, body) }
	}
	consumer := func(_ int, acknowledged func(int)) {
		consumer, err := jetStream(leader).Consumer(context.Background(), *topic, groupName)
		check(err)
		_, err = consumer.Consume(func(message jetstream.Msg) {
			check(message.Ack())
			acknowledged(1)
		}, jetstream.PullMaxMessages(window))
		check(err)
	}
	return system{group, publisher, consumer}
}

// leaderOfStream returns the address of the stream's leader. The stream is created if there is none, which the servers
// refuse until they have found each other.
func leaderOfStream(addresses []string) string {
	servers := jetStream(addresses[0])
	config := jetstream.StreamConfig{
		Name: *topic, Subjects: []string{*topic}, Storage: jetstream.FileStorage, Replicas: len(addresses),
		AllowAtomicPublish: true,
	}
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		stream, err := servers.CreateStream(ctx, config)
		if err == nil {
			var info *jetstream.StreamInfo
			info, err = stream.Info(ctx)
			if err == nil && len(addresses) == 1 {
				cancel()
				return addresses[0]
			}
			if err == nil && info.Cluster != nil && allCurrent(info.Cluster, len(addresses)) {
				cancel()
				for n, address := range addresses {
					if info.Cluster.Leader == fmt.Sprintf("n%d", n) {
						return address
					}
				}
				log.Fatalf("no server is named %q", info.Cluster.Leader)
			}
		}
		cancel()
		time.Sleep(100 * time.Millisecond)
	}
}

// allCurrent tells whether there is a leader, and every other server has all that it has.
func allCurrent(cluster *jetstream.ClusterInfo, servers int) bool {
	for _, replica := range cluster.Replicas {
		if !replica.Current || replica.Offline {
			return false
		}
	}
	return cluster.Leader != "" && len(cluster.Replicas) == servers-1
}

func jetStream(address string) jetstream.JetStream {
	conn, err := nats.Connect(
		"nats://"+address, nats.IgnoreDiscoveredServers(), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1),
		nats.ReconnectWait(100*time.Millisecond),
	)
	check(err)
	stream, err := jetstream.New(conn, jetstream.WithDefaultTimeout(patience))
	check(err)
	return stream
}

// ------------------------------------------------------------------------------------------ Redis

func newRedis(addresses []string) system {
	replicas := len(addresses) - 1
	open := func() *redis.Client {
		return redis.NewClient(&redis.Options{Addr: addresses[0], PoolSize: 1, MaxRetries: -1, ReadTimeout: patience})
	}
	group := func() {
		err := open().XGroupCreateMkStream(context.Background(), *topic, groupName, "0").Err()
		if err != nil && !strings.HasPrefix(err.Error(), "BUSYGROUP") {
			check(err)
		}
	}
	publisher := func(_ int, batch int, body []byte) func() {
		client := open()
		return func() {
			ctx := context.Background()
			together := client.Pipeline()
			for range batch {
				together.XAdd(ctx, &redis.XAddArgs{Stream: *topic, Values: []any{"body", body}})
			}
			if replicas == 0 {
				_, err := together.Exec(ctx)
				check(err)
				return
			}
			wait := together.Do(ctx, "WAIT", replicas, 0)
			_, err := together.Exec(ctx)
			check(err)
			if found, err := wait.Int(); err != nil || found < replicas {
				log.Fatalf("%d replicas have acknowledged the entry: %v", found, err)
			}
		}
	}
	consumer := func(n int, acknowledged func(int)) {
		client := open()
		reading := &redis.XReadGroupArgs{
			Group: groupName, Consumer: fmt.Sprint(n), Streams: []string{*topic, ">"}, Count: window, Block: 100 * time.Millisecond,
		}
		go func() {
			var ids []string
			for {
				ctx := context.Background()
				together := client.Pipeline()
				if len(ids) > 0 {
					together.XAck(ctx, *topic, groupName, ids...)
				}
				read := together.XReadGroup(ctx, reading)
				if _, err := together.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
					check(err)
				}
				acknowledged(len(ids))
				ids = ids[:0]
				for _, stream := range read.Val() {
					for _, message := range stream.Messages {
						ids = append(ids, message.ID)
					}
				}
			}
		}()
	}
	return system{group, publisher, consumer}
}

// ------------------------------------------------------------------------------------------ etcd

func newEtcd(addresses []string) system {
	leader := leaderOfEtcd(addresses)
	return system{publisher: func(n int, batch int, body []byte) func() {
		if batch != 1 {
			log.Fatal("etcd publishes one message at a time")
		}
		client := etcdClient(leader)
		value, run, next := string(body), time.Now().UnixNano(), 0
		return func() {
			_, err := client.Put(context.Background(), fmt.Sprintf("%s/%d/%d/%d", *topic, run, n, next), value)
			check(err)
			next++
		}
	}}
}

func leaderOfEtcd(addresses []string) string {
	for {
		for _, address := range addresses {
			client := etcdClient(address)
			status, err := client.Status(context.Background(), address)
			check(err)
			check(client.Close())
			if status.Leader == status.Header.MemberId {
				return address
			}
		}
	}
}

func etcdClient(address string) *clientv3.Client {
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{strings.TrimPrefix(address, "http://")}, DialTimeout: patience,
	})
	check(err)
	return client
}
