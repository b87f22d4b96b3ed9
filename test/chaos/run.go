// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/test/chaos/audit"
)

// run is a phase while it runs. One goroutine has it: all that happens comes
// through the watch on etcd.
type run struct {
	phase   phase
	out     io.Writer
	log     io.Writer // every change, for whoever looks for the cause of a failure
	watch   *etcdWatch
	history *audit.History
	owner   *owner
	members []*member
	load    *load
	trouble *trouble

	competitors *competitors // nil without kube-scheduler

	plans    map[string]podPlan // of pods that are not gone, by name
	bound    map[string]bool    // pods that have had a node, by name
	arrived  int                // claims
	tide     int                // how often the load has ebbed away
	ebbing   bool               // nothing arrives until all pods are gone
	progress time.Time          // when a pod was bound or went last
}

// untilAllHaveGone lets claims arrive until there were enough, makes trouble on
// the way, and returns when all pods are gone.
func (r *run) untilAllHaveGone(ctx context.Context) error {
	acts := programme(r.trouble.random, r.phase.rounds)
	total := len(acts)
	due := make(chan act)
	r.trouble.wg.Go(func() { // one after the other, as each takes its time
		for a := range due {
			a.do(r.trouble, ctx)
		}
	})
	defer close(due)
	r.trouble.changeDelays()
	r.progress = time.Now()

	second := time.NewTicker(time.Second)
	defer second.Stop()
	delays := time.NewTicker(delayInterval)
	defer delays.Stop()
	for {
		r.arrive(ctx)
		if len(acts) == 0 && r.arrived >= r.phase.claims && len(r.plans) == 0 {
			return nil
		}
		// The acts are spread over the arrivals.
		var next chan<- act
		var first act
		if done := total - len(acts); len(acts) > 0 && r.arrived*(total+1) >= r.phase.claims*(done+1) {
			next, first = due, acts[0]
		}
		select {
		case answer, ok := <-r.watch.changes:
			if err := r.take(ctx, answer, ok); err != nil {
				return err
			}
		case next <- first:
			acts = acts[1:]
		case <-second.C:
			if err := r.inspect(); err != nil {
				return err
			}
			r.competitors.takeTurns(ctx, r)
		case <-delays.C:
			r.trouble.changeDelays()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// arrive lets claims come as long as few pods wait. The load ebbs away several
// times, so that pods run that need much at once, and that one which nobody would
// ever wake is noticed.
func (r *run) arrive(ctx context.Context) {
	if r.ebbing && len(r.plans) > 0 {
		return
	}
	r.ebbing = false
	if len(r.plans) == 0 {
		// Some pods were deleted before they had claims.
		r.arrived = r.history.Counts().Claims - r.competitors.claims()
	}
	for r.arrived < r.phase.claims && r.waiting() < r.phase.backlog {
		a := r.load.arrive()
		r.arrived += a.claims
		for _, p := range a.pods {
			r.plans[p.pod.Name] = p
		}
		r.owner.wg.Go(func() { r.owner.arrive(ctx, a) })
		if r.arrived*tides >= r.phase.claims*(r.tide+1) {
			r.tide++
			r.ebbing = true
			return
		}
	}
}

// waiting counts the pods without a node. Large ones may wait until nobody else
// does.
func (r *run) waiting() int {
	n := 0
	for name, p := range r.plans {
		if !r.bound[name] && !p.large {
			n++
		}
	}
	return n
}

// take takes in what the watch on etcd brought.
func (r *run) take(ctx context.Context, answer clientv3.WatchResponse, ok bool) error {
	revisions, err := r.watch.read(answer, ok)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	for _, rev := range revisions {
		now := time.Now()
		violations := r.history.Apply(rev.number, now, rev.changes...)
		for _, change := range rev.changes {
			fmt.Fprintf(r.log, "%s %d %s\n", now.Format("15:04:05.000"), rev.number, describe(change))
			if change.Pod != nil {
				r.takePod(ctx, change.Pod, change.Deleted)
			}
		}
		for _, v := range violations {
			fmt.Fprintf(r.log, "VIOLATION %s\n", v)
			if r.phase.toProve {
				r.phase.claims = 0 // one is enough
				continue
			}
			fmt.Fprintf(r.out, "violation at %s\n", v)
		}
	}
	return nil
}

func (r *run) takePod(ctx context.Context, pod *corev1.Pod, deleted bool) {
	p, planned := r.plans[pod.Name]
	if !planned {
		return
	}
	switch {
	case deleted:
		delete(r.plans, pod.Name)
		r.progress = time.Now()
	case pod.Spec.NodeName != "" && !r.bound[pod.Name]:
		r.bound[pod.Name] = true
		r.progress = time.Now()
		r.owner.run(ctx, p)
	}
}

// inspect looks for what no event tells: schedulers that ended by themselves, and
// pods that wait though nothing happens any more.
func (r *run) inspect() error {
	for _, m := range r.members {
		if err := m.crashed(); err != nil {
			return err
		}
	}
	if len(r.plans) == 0 || time.Since(r.progress) < stuckAfter {
		return nil
	}
	var stuck []string
	for _, name := range slices.Sorted(maps.Keys(r.plans)) {
		stuck = append(stuck, r.whyWaiting(name))
	}
	return fmt.Errorf("nothing has happened for %s, and %d pods are stuck:\n  %s", stuckAfter, len(stuck), strings.Join(stuck, "\n  "))
}

// whyWaiting says in a line what a pod says itself.
func (r *run) whyWaiting(name string) string {
	pod := r.history.Pods()[audit.Key{Namespace: r.phase.name, Name: name}]
	if pod == nil {
		return name + " could not be created"
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return fmt.Sprintf("%s of %s on node %q: %s %s", name, pod.Spec.SchedulerName, pod.Spec.NodeName, c.Reason, c.Message)
		}
	}
	return fmt.Sprintf("%s of %s on node %q: never tried", name, pod.Spec.SchedulerName, pod.Spec.NodeName)
}

// describe is a line about an object after a change.
func describe(c audit.Change) string {
	switch {
	case c.Pod != nil && c.Deleted:
		return "pod " + c.Pod.Name + " deleted"
	case c.Pod != nil:
		return fmt.Sprintf("pod %s scheduler=%s node=%s phase=%s", c.Pod.Name, c.Pod.Spec.SchedulerName, c.Pod.Spec.NodeName, c.Pod.Status.Phase)
	case c.Deleted:
		return "claim " + c.Claim.Name + " deleted"
	}
	var devices, pods []string
	if a := c.Claim.Status.Allocation; a != nil {
		for _, result := range a.Devices.Results {
			devices = append(devices, result.Pool+"/"+result.Device)
		}
	}
	for _, reserved := range c.Claim.Status.ReservedFor {
		pods = append(pods, reserved.Name)
	}
	return fmt.Sprintf("claim %s devices=%v reservedFor=%v writer=%s", c.Claim.Name, devices, pods, lastWriter(c.Claim))
}

// lastWriter is who wrote an object last, as far as managed fields tell.
func lastWriter(claim *resourceapi.ResourceClaim) string {
	writer, when := "", time.Time{}
	for _, f := range claim.ManagedFields {
		if f.Time != nil && !f.Time.Time.Before(when) {
			writer, when = f.Manager+"/"+f.Subresource, f.Time.Time
		}
	}
	return writer
}
