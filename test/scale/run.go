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
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"stowage.dev/stowage/internal/localcluster"
)

type options struct {
	size
	root, binary string
	figuresFile  string
	limit        time.Duration
	out          io.Writer
}

// bench is one run.
type bench struct {
	options
	cluster   *localcluster.Cluster
	client    kubernetes.Interface // the administrator's, without limits
	config    string               // the scheduler's configuration file
	scheduler *localcluster.Scheduler
	logs      []string // of the schedulers so far
	bindings  *bindings
	figures   *figures
	random    *rand.Rand

	// What there is to be in the API.
	held    []holding
	running []running
	alive   map[types.NamespacedName]int // GPUs of each pod that is to be bound
	waiting []types.NamespacedName       // pods that no node fits
	made    int                          // pods that the scheduler was given
	planted *plant
}

// running are pods that use one claim.
type running struct {
	namespace string
	pods      []string
	claim     string // empty if it was made from a template
}

// controllers are those that DRA and our own use of the cluster need. Others would read and write all nodes and pods, and what
// is measured are schedulers.
const controllers = "resourceclaim-controller,garbage-collector-controller," +
	"serviceaccount-controller,root-ca-certificate-publisher-controller"

func run(ctx context.Context, o options) (err error) {
	begin := time.Now()
	b, err := newBench(o)
	if err != nil {
		return err
	}
	if b.cluster, err = localcluster.Start(ctx, localcluster.Options{
		Progress:              o.out,
		ControllerManagerArgs: []string{"--controllers=" + controllers},
	}); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			b.cluster.Keep()
			b.say("logs of all processes are in %s", b.cluster.LogDir())
		}
		err = errors.Join(err, b.cluster.Stop())
	}()
	// Before the cluster stops: kube-apiserver waits for watches that are still open.
	ctx, endWatches := context.WithCancel(ctx)
	defer endWatches()
	if err := b.prepare(ctx); err != nil {
		return err
	}
	for _, p := range []struct {
		name string
		run  func(*bench, context.Context) error
	}{
		{"populate", (*bench).populate},
		{"start", (*bench).start},
		{"burst", (*bench).burst},
		{"churn", (*bench).churn},
		{"audit", (*bench).audit},
		{"restart", (*bench).restart},
		{"count", (*bench).count},
	} {
		if err := b.phase(ctx, p.name, p.run); err != nil {
			return fmt.Errorf("phase %s: %w", p.name, err)
		}
	}
	b.figures.seconds("everything", time.Since(begin))
	if err := b.tell(); err != nil {
		return err
	}
	return b.checkLogs()
}

// newBench checks what can be checked before anything is started.
func newBench(o options) (*bench, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	var err error
	for _, path := range []*string{&o.root, &o.binary} {
		if *path, err = filepath.Abs(*path); err != nil {
			return nil, err
		}
	}
	if _, err := os.Stat(o.binary); err != nil {
		return nil, fmt.Errorf("the scheduler has not been built, run 'make build': %w", err)
	}
	b := &bench{
		options: o, figures: newFigures(o.size), random: rand.New(rand.NewPCG(o.Seed, 1)), alive: map[types.NamespacedName]int{},
	}
	if b.held, err = population(o.size); err != nil {
		return nil, err
	}
	for i := range b.held {
		h := &b.held[i]
		for _, pod := range h.pods {
			b.alive[types.NamespacedName{Namespace: h.namespace, Name: pod}] = h.count
		}
		if h.allocated() {
			b.running = append(b.running, running{namespace: h.namespace, pods: h.pods, claim: h.name})
		}
	}
	return b, nil
}

// prepare installs what a user installs, and connects.
func (b *bench) prepare(ctx context.Context) error {
	manifests := filepath.Join(b.root, "manifests", "base")
	if err := b.cluster.Apply(ctx, filepath.Join(manifests, "access"), filepath.Join(manifests, "deviceclasses")); err != nil {
		return err
	}
	config := b.cluster.AdminConfig()
	config.QPS = -1
	config.ContentType = runtime.ContentTypeProtobuf
	var err error
	if b.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if b.config, err = b.writeConfig(); err != nil {
		return err
	}
	b.bindings, err = watchBindings(ctx, b.client)
	return err
}

// phase runs one phase, and says what it took.
func (b *bench) phase(ctx context.Context, name string, run func(*bench, context.Context) error) error {
	b.say("--- %s", name)
	begin := time.Now()
	before, err := cpuNow()
	if err != nil {
		return err
	}
	if err := run(b, ctx); err != nil {
		return err
	}
	after, err := cpuNow()
	if err != nil {
		return err
	}
	load, err := loadAverage()
	if err != nil {
		return err
	}
	b.say("%s took %s; load of the machine %.1f; processor time %s", name, since(begin), load, after.since(before))
	b.figures.number(name+": load of the machine", load, "")
	return nil
}

// tell prints the figures, and writes them if that is asked for.
func (b *bench) tell() error {
	fmt.Fprintln(b.out)
	if err := b.figures.print(b.out); err != nil {
		return err
	}
	fmt.Fprintln(b.out)
	if b.figuresFile == "" {
		return nil
	}
	return b.figures.write(b.figuresFile)
}

func (b *bench) say(format string, args ...any) { fmt.Fprintf(b.out, format+"\n", args...) }
