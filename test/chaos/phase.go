// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/test/chaos/audit"
)

// phase is one run of schedulers and load on the cluster.
type phase struct {
	name    string // of its namespace, too
	claims  int    // how many come and go
	rounds  int    // of trouble; 0 for none
	args    string // of our plugin, YAML
	ours    int    // schedulers of ours
	stock   bool   // kube-scheduler competes for the same devices
	toProve bool   // ends at the first violation, and fails without one

	backlog int           // pods that wait at a time
	hold    time.Duration // how long a pod runs, on average
}

// profile is the name of the i-th scheduler's profile.
func (p phase) profile(i int) string { return fmt.Sprintf("%s-%d", p.name, i) }

const (
	// tides is how often the load ebbs away during a phase, which lets pods run that need much at once.
	tides = 4
	// stuckAfter is how long nothing may happen while pods wait.
	stuckAfter = 60 * time.Second
	// settleTimeout is how long releasing may take when all pods are gone.
	settleTimeout = 60 * time.Second
	// delayInterval is how long the delays of the network stay the same.
	delayInterval = 3 * time.Second
)

// bench is what all phases share.
type bench struct {
	cluster *localcluster.Cluster
	etcd    *clientv3.Client
	pool    *pool
	binary  string // our scheduler
	seed    uint64
	out     io.Writer
}

// outcome is how a phase ended.
type outcome struct {
	audit.Counts
	took time.Duration
}

func (o outcome) String() string {
	return fmt.Sprintf("claims %d, conflicts detected %d, rolled back %d, retries %d, longest wait %s, violations %d",
		o.Claims, o.Conflicts, o.RolledBack, o.Retries, o.LongestWait.Round(100*time.Millisecond), o.Violations)
}

// run runs a phase to its end: everything that came is gone.
func (b *bench) run(ctx context.Context, p phase) (_ outcome, err error) {
	fmt.Fprintf(b.out, "--- %s\n", p.name)
	begin := time.Now()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := b.cluster.CreateNamespace(ctx, p.name); err != nil {
		return outcome{}, err
	}
	log, err := os.Create(filepath.Join(b.cluster.LogDir(), "history-"+p.name+".log"))
	if err != nil {
		return outcome{}, err
	}
	defer log.Close()
	watch, err := watchEtcd(ctx, b.etcd, p.name)
	if err != nil {
		return outcome{}, err
	}
	members, err := b.startMembers(ctx, p)
	if err != nil {
		return outcome{}, err
	}
	random := func(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(b.seed, stream)) }
	owner := &owner{client: b.cluster.AdminClient(), namespace: p.name, log: b.out}
	if err := owner.createTemplates(ctx); err != nil {
		return outcome{}, err
	}
	if p.stock {
		defer func() { err = errors.Join(err, b.endOwnership(ctx)) }()
	}
	r := &run{
		phase:   p,
		out:     b.out,
		log:     log,
		watch:   watch,
		history: audit.NewHistory(audit.NewInventory(b.pool.slices)),
		owner:   owner,
		members: members,
		load:    newLoad(random(1), p, members),
		trouble: &trouble{cluster: b.cluster, members: members, random: random(2), delays: random(3), log: b.out, fail: cancel},
		plans:   map[string]podPlan{},
		bound:   map[string]bool{},
	}
	if p.stock {
		r.competitors = newCompetitors(p.name)
	}
	err = r.untilAllHaveGone(ctx)
	if err == nil && p.stock {
		err = r.dismissCompetitors(ctx)
	}
	if err == nil {
		err = r.checkLeaks(ctx)
	}
	cancel(nil)
	owner.wg.Wait()
	r.trouble.wg.Wait()
	for _, m := range members {
		err = errors.Join(err, m.stop())
	}
	return outcome{r.history.Counts(), time.Since(begin)}, err
}

// startMembers starts the schedulers of a phase.
// kube-scheduler comes last: it must not see the devices before they are owned.
func (b *bench) startMembers(ctx context.Context, p phase) ([]*member, error) {
	var members []*member
	for i := range p.ours {
		m, err := newMember(ctx, b.cluster, b.binary, p.profile(i), p.args)
		if err != nil {
			return nil, err
		}
		members = append(members, m)
	}
	var starting sync.WaitGroup
	errs := make([]error, len(members))
	for i, m := range members {
		starting.Go(func() { errs[i] = m.up(ctx) })
	}
	starting.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if p.stock {
		if err := b.awaitOwnership(ctx, len(members)); err != nil {
			return nil, err
		}
		stock := newStockMember(b.cluster)
		members = append(members, stock)
		return members, stock.up(ctx)
	}
	return members, nil
}

func newLoad(random *rand.Rand, p phase, members []*member) *load {
	l := &load{random: random, namespace: p.name, hold: p.hold}
	for _, m := range members {
		if !m.stock {
			l.schedulers = append(l.schedulers, m.name)
		}
	}
	return l
}
