// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command chaos lets several schedulers hand out one pool of devices on a real
// control plane, while schedulers and the API server are killed, connections
// cut and etcd is paused, and judges every revision of etcd: no device may be
// over-used by the claims of bound pods, nothing may leak, and every pod that
// can run must run.
//
// Three phases, each on the same pool:
//
//   - unfenced: the same schedulers without the fence hand out a device twice.
//     This shows that the other phases can fail; without a violation it fails.
//   - owned: kube-scheduler competes for the devices, which ownership keeps from
//     it, in all trouble, with pods that come and go.
//   - fenced: the claims, with all trouble. Its counts are the last line.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/internal/localcluster"
)

func main() {
	c := chaos{}
	flag.StringVar(&c.root, "root", ".", "the project's folder; bin/scheduler must be in it")
	flag.IntVar(&c.claims, "claims", 2000, "how many claims come and go in the phase fenced")
	flag.IntVar(&c.rounds, "rounds", 3, "how often each kind of trouble happens in the phase fenced")
	flag.Uint64Var(&c.seed, "seed", 1, "what chance begins with: the same load and the same programme of trouble")
	flag.StringVar(&c.phases, "phases", "unfenced,owned,fenced", "what to run, in this order")
	flag.BoolVar(&c.short, "short", false, "a smoke test: 150 claims, each kind of trouble once")
	flag.DurationVar(&c.limit, "limit", 10*time.Minute, "how long it may take in all")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// client-go logs that watches end, which is what happens here all the time.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	if err := c.run(ctx); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything is stopped")
		}
		fmt.Fprintf(os.Stderr, "\nchaos failed: %v\n", err)
		os.Exit(1)
	}
}

// chaos is one run of the program.
type chaos struct {
	root, phases   string
	claims, rounds int
	seed           uint64
	short          bool
	limit          time.Duration
}

// all are the phases as the flags want them.
func (c *chaos) all() []phase {
	owned := 300
	if c.short {
		c.claims, c.rounds, owned = min(c.claims, 150), 1, 60
	}
	const backlog, hold = 30, 6 * time.Second
	return []phase{
		{name: "unfenced", claims: 300, ours: 3, args: fenceOff, toProve: true, backlog: backlog, hold: hold},
		{name: "owned", claims: owned, rounds: 1, ours: 3, stock: true, args: ownershipOn, backlog: backlog, hold: hold / 3},
		{name: "fenced", claims: c.claims, rounds: c.rounds, ours: 3, backlog: backlog, hold: hold},
	}
}

// Arguments of the plugin, as they stand in a configuration file.
const (
	fenceOff    = "      fence: {enabled: false}\n"
	ownershipOn = "      ownership: {enabled: true}\n"
)

func (c *chaos) run(ctx context.Context) (err error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, c.limit, fmt.Errorf("not done after %s", c.limit))
	defer cancel()
	phases, err := c.chosen()
	if err != nil {
		return err
	}
	b, err := c.start(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			b.cluster.Keep()
			fmt.Fprintf(b.out, "logs of all processes, and the history of all claims and pods, are in %s\n", b.cluster.LogDir())
		}
		err = errors.Join(err, b.cluster.Stop())
	}()
	var last outcome
	for _, p := range phases {
		last, err = b.run(ctx, p)
		fmt.Fprintf(b.out, "%s: %s in %s\n", p.name, last, last.took.Round(time.Second))
		if err = errors.Join(err, last.judge(p)); err != nil {
			return fmt.Errorf("phase %s, seed %d: %w", p.name, c.seed, err)
		}
	}
	fmt.Fprintf(b.out, "all as it should be after %s, seed %d\n", time.Since(begin).Round(time.Second), c.seed)
	fmt.Fprintln(b.out, last)
	return nil
}

// judge says whether a phase has shown what it is for.
func (o outcome) judge(p phase) error {
	switch {
	case p.toProve && o.Violations == 0:
		return errors.New("without the fence no device was handed out twice: this run proves nothing")
	case !p.toProve && o.Violations > 0:
		return fmt.Errorf("%d violations", o.Violations)
	case p.rounds > 0 && !p.stock && o.Conflicts == 0:
		return errors.New("no two schedulers ever decided on the same device: this run proves nothing")
	}
	return nil
}

// chosen are the phases of the flag.
func (c *chaos) chosen() ([]phase, error) {
	all := c.all()
	var chosen []phase
	for _, name := range strings.Split(c.phases, ",") {
		i := slices.IndexFunc(all, func(p phase) bool { return p.name == name })
		if i < 0 {
			return nil, fmt.Errorf("--phases: there is no phase %q", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// start starts the cluster and makes the pool.
func (c *chaos) start(ctx context.Context) (*bench, error) {
	root, err := filepath.Abs(c.root)
	if err != nil {
		return nil, err
	}
	b := &bench{pool: newPool(), binary: filepath.Join(root, "bin", "scheduler"), seed: c.seed, out: os.Stdout}
	if _, err := os.Stat(b.binary); err != nil {
		return nil, fmt.Errorf("the scheduler has not been built, run 'make build': %w", err)
	}
	b.cluster, err = localcluster.Start(ctx, localcluster.Options{
		Progress: os.Stdout,
		Sets:     []localcluster.BinarySet{localcluster.StockScheduler},
		// Nobody renews the leases of nodes made by hand.
		ControllerManagerArgs: []string{"--node-monitor-grace-period=2h"},
	})
	if err != nil {
		return nil, err
	}
	if err := c.prepare(ctx, b, root); err != nil {
		return nil, errors.Join(err, b.cluster.Stop())
	}
	return b, nil
}

func (c *chaos) prepare(ctx context.Context, b *bench, root string) (err error) {
	manifests := filepath.Join(root, "manifests")
	if err := b.cluster.Apply(ctx, filepath.Join(manifests, "base", "access"), filepath.Join(manifests, "ownership")); err != nil {
		return err
	}
	if b.etcd, err = newEtcdClient(b.cluster.EtcdURL()); err != nil {
		return err
	}
	if err := b.cluster.OnStop("the watch on etcd", b.etcd.Close); err != nil {
		return err
	}
	if err := b.grantOwnership(ctx); err != nil {
		return err
	}
	return b.pool.create(ctx, b.cluster.AdminClient())
}
