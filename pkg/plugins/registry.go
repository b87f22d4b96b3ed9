// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"

	// Registers the arguments' types.
	_ "stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/pkg/plugins/numa"
)

// Set is the plugins of one scheduler. All its profiles share one account of who holds which device. A second
// scheduler in the same process needs a set of its own.
type Set struct {
	shared *deviceclaims.Shared
}

// Option is what is unusual about a set.
type Option func(*settings)

type settings struct {
	limits  deviceclaims.Limits
	reading deviceclaims.Reading
}

// WithLimits gives the plugins more time for what they may leave half done, or less.
func WithLimits(limits deviceclaims.Limits) Option {
	return func(s *settings) { s.limits = limits }
}

// WithReading has the plugins read the cluster in another way.
func WithReading(reading deviceclaims.Reading) Option {
	return func(s *settings) { s.reading = reading }
}

// NewSet returns the plugins for one scheduler.
func NewSet(options ...Option) *Set {
	var s settings
	for _, option := range options {
		option(&s)
	}
	shared := deviceclaims.NewShared(s.limits)
	shared.Reading = s.reading
	return &Set{shared: shared}
}

// NewRegistry is the registry of a new set, for a scheduler that is not adopted: a test's or a benchmark's.
func NewRegistry() frameworkruntime.Registry { return NewSet().Registry() }

// Registry has the plugins by name.
func (s *Set) Registry() frameworkruntime.Registry {
	return frameworkruntime.Registry{
		deviceclaims.Name: func(ctx context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			return deviceclaims.New(ctx, args, handle, s.shared)
		},
		numa.Name: numa.New,
	}
}

// Adopt completes a scheduler that was made with the registry, before it runs. It refuses profiles that [Validate]
// refuses, has what only a scheduler that leads may do begin when that scheduler runs, and keeps the scheduler from warning of what is
// nobody's mistake. A scheduler without DeviceClaims it leaves as it is.
func (s *Set) Adopt(sched *scheduler.Scheduler) error {
	if err := Validate(sched.Profiles); err != nil {
		return err
	}
	if !usedByAny(sched.Profiles) {
		return nil // nothing of what the profiles share was made
	}
	if sched.SchedulingQueue == nil {
		return fmt.Errorf("the scheduler has no scheduling queue")
	}
	sched.FailureHandler = s.shared.EndNominations(s.shared.HandleFailures(sched.FailureHandler))
	sched.SchedulingQueue = leadingQueue{sched.SchedulingQueue, s.shared.Lead}
	return nil
}

// leadingQueue tells when its scheduler begins to schedule. With leader election, several replicas have all their
// plugins and caches ready, and only the leader's queue is run; kube-scheduler tells plugins in no other way. A
// scheduler that loses the lead ends its process.
type leadingQueue struct {
	internalqueue.SchedulingQueue
	lead func()
}

func (q leadingQueue) Run(logger klog.Logger) {
	q.lead()
	q.SchedulingQueue.Run(logger)
}
