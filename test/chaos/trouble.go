// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"stowage.dev/stowage/internal/localcluster"
)

// trouble is what happens to the cluster while it works.
type trouble struct {
	cluster *localcluster.Cluster
	members []*member
	random  *rand.Rand // of the acts, which are done one after the other
	delays  *rand.Rand // of changeDelays
	log     io.Writer
	wg      sync.WaitGroup
	fail    func(error) // the run is lost
}

// Delays of what the API server sends. They are what makes two schedulers decide
// on the same device: until a watch event has arrived, it is free.
const (
	minDelay = 50 * time.Millisecond
	maxDelay = 500 * time.Millisecond
)

// act is one kind of trouble.
type act struct {
	name string
	do   func(*trouble, context.Context)
}

// acts are all kinds of trouble.
var acts = []act{
	{"kill", (*trouble).killOne},
	{"kill", (*trouble).killOne},
	{"kill", (*trouble).killOne},
	{"kill all", (*trouble).killAll},
	{"cut", (*trouble).cutOne},
	{"cut", (*trouble).cutAll},
	{"pause etcd", (*trouble).pauseEtcd},
	{"crash the API server", (*trouble).crashAPIServer},
}

// programme is a shuffled row of acts with every kind in it, several times over
// when rounds are more than one.
func programme(random *rand.Rand, rounds int) []act {
	var all []act
	for range rounds {
		round := append([]act{}, acts...)
		random.Shuffle(len(round), func(i, j int) { round[i], round[j] = round[j], round[i] })
		all = append(all, round...)
	}
	return all
}

// changeDelays gives every connection to the API server another delay.
func (t *trouble) changeDelays() {
	for _, m := range t.members {
		if m.proxy != nil {
			m.proxy.SetDelay(between(t.delays, minDelay, maxDelay))
		}
	}
}

func (t *trouble) killOne(ctx context.Context) { t.kill(ctx, t.one()) }

func (t *trouble) killAll(ctx context.Context) {
	for _, m := range t.members {
		t.kill(ctx, m)
	}
}

// kill ends a scheduler with SIGKILL and starts it again a while later; the run
// goes on meanwhile.
func (t *trouble) kill(ctx context.Context, m *member) {
	wasUp, err := m.kill()
	if err != nil {
		t.fail(err)
		return
	}
	if !wasUp {
		return // it is being started
	}
	t.say("killed %s", m.name)
	down := between(t.random, 0, 3*time.Second)
	t.wg.Go(func() {
		pause(ctx, down)
		if err := m.upAgain(ctx); err != nil && ctx.Err() == nil {
			t.fail(err)
		}
	})
}

func (t *trouble) cutOne(context.Context) { t.cut(t.one()) }

func (t *trouble) cutAll(context.Context) {
	for _, m := range t.members {
		t.cut(m)
	}
}

func (t *trouble) cut(m *member) {
	if m.proxy != nil {
		t.say("cutting %d connections of %s", m.proxy.Cut(), m.name)
	}
}

func (t *trouble) pauseEtcd(ctx context.Context) {
	d := between(t.random, 2*time.Second, 5*time.Second)
	t.say("pausing etcd for %s", d.Round(time.Millisecond))
	if err := t.cluster.PauseEtcd(); err != nil {
		t.fail(err)
		return
	}
	pause(ctx, d)
	if err := t.cluster.ResumeEtcd(); err != nil {
		t.fail(err)
	}
}

func (t *trouble) crashAPIServer(ctx context.Context) {
	t.say("killing kube-apiserver")
	begin := time.Now()
	if err := t.cluster.CrashAPIServer(ctx); err != nil {
		if ctx.Err() == nil {
			t.fail(err)
		}
		return
	}
	t.say("kube-apiserver is back after %s", time.Since(begin).Round(100*time.Millisecond))
}

func (t *trouble) one() *member { return t.members[t.random.IntN(len(t.members))] }

func between(random *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(random.Int64N(int64(most-least)))
}

func (t *trouble) say(format string, args ...any) { fmt.Fprintf(t.log, format+"\n", args...) }
