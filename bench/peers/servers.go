package main

import (
	"context"
	"fmt"
	"log"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nsqio/go-nsq"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func toNSQ(addresses []string) func(n int, body []byte) func() {
	return func(_ int, body []byte) func() {
		producer, err := nsq.NewProducer(addresses[0], nsq.NewConfig())
		check(err)
		producer.SetLoggerLevel(nsq.LogLevelError)
		return func() { check(producer.Publish(topic, body)) }
	}
}

func toNATS(addresses []string) func(n int, body []byte) func() {
	leader := leaderOfStream(addresses)
	return func(_ int, body []byte) func() {
		stream := jetStream(leader)
		return func() {
			_, err := stream.Publish(context.Background(), topic, body)
			check(err)
		}
	}
}

// leaderOfStream returns the address of the stream's leader. The stream is created if there is none, which the servers
// refuse until they have found each other.
func leaderOfStream(addresses []string) string {
	servers := jetStream(addresses[0])
	config := jetstream.StreamConfig{
		Name: topic, Subjects: []string{topic}, Storage: jetstream.FileStorage, Replicas: len(addresses),
	}
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		stream, err := servers.CreateStream(ctx, config)
		if err == nil {
			var info *jetstream.StreamInfo
			if info, err = stream.Info(ctx); err == nil && info.Cluster != nil && allCurrent(info.Cluster, len(addresses)) {
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
	stream, err := jetstream.New(conn, jetstream.WithDefaultTimeout(30*time.Second))
	check(err)
	return stream
}

func toRedis(addresses []string) func(n int, body []byte) func() {
	return func(_ int, body []byte) func() {
		client := redis.NewClient(&redis.Options{Addr: addresses[0], PoolSize: 1, MaxRetries: -1, ReadTimeout: 30 * time.Second})
		return func() {
			ctx := context.Background()
			both := client.Pipeline()
			both.XAdd(ctx, &redis.XAddArgs{Stream: topic, Values: []any{"body", body}})
			wait := both.Do(ctx, "WAIT", 1, 0)
			_, err := both.Exec(ctx)
			check(err)
			if replicas, err := wait.Int(); err != nil || replicas < 1 {
				log.Fatalf("%d replicas have acknowledged the entry: %v", replicas, err)
			}
		}
	}
}

func toEtcd(addresses []string) func(n int, body []byte) func() {
	leader := leaderOfEtcd(addresses)
	return func(n int, body []byte) func() {
		client := etcdClient(leader)
		value, run, next := string(body), time.Now().UnixNano(), 0
		return func() {
			_, err := client.Put(context.Background(), fmt.Sprintf("%s/%d/%d/%d", topic, run, n, next), value)
			check(err)
			next++
		}
	}
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
		Endpoints: []string{strings.TrimPrefix(address, "http://")}, DialTimeout: 30 * time.Second,
	})
	check(err)
	return client
}
