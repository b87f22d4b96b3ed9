// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
)

const probeName = "Probe"

// probe is a scheduler plugin of the tests'. It counts what the scheduler does with a pod, and makes steps
// that come after ours wait or fail. The zero value only counts.
type probe struct {
	// permit, if set, is the Permit step; it comes after every plugin's Reserve.
	permit func(ctx context.Context, pod *v1.Pod, node string) (*fwk.Status, time.Duration)
	// unreserve, if set, is the Unreserve step; it comes before every plugin's.
	unreserve func(pod *v1.Pod)
	// preBind, if set, is the PreBind step after ours.
	preBind func(ctx context.Context, pod *v1.Pod, node string) *fwk.Status

	handle fwk.Handle // set once, before the scheduler runs

	mutex sync.Mutex
	seen  map[string]*podCounts // by pod name
}

// podCounts is how often the scheduler reached a step for a pod.
type podCounts struct {
	attempts, filtered, reserved int
	// taken counts the pods that preemption took off a node to see whether the pod fits without them.
	taken int
}

var (
	_ fwk.PreFilterPlugin   = &probe{}
	_ fwk.FilterPlugin      = &probe{}
	_ fwk.ReservePlugin     = &probe{}
	_ fwk.PermitPlugin      = &probe{}
	_ fwk.PreBindPlugin     = &probe{}
	_ fwk.SignPlugin        = &probe{}
	_ fwk.EnqueueExtensions = &probe{}
)

// enableIn puts the probe first in PreFilter, so that it sees every attempt, and last at all other points.
func (p *probe) enableIn(profile *schedulerconfig.KubeSchedulerProfile) {
	probe := schedulerconfig.Plugin{Name: probeName}
	profile.Plugins.MultiPoint.Enabled = append(profile.Plugins.MultiPoint.Enabled, probe)
	profile.Plugins.PreFilter.Enabled = append([]schedulerconfig.Plugin{probe}, profile.Plugins.PreFilter.Enabled...)
}

func (p *probe) factory(_ context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	p.handle = handle
	return p, nil
}

func (p *probe) count(pod *v1.Pod, f func(*podCounts)) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.seen == nil {
		p.seen = map[string]*podCounts{}
	}
	if p.seen[pod.Name] == nil {
		p.seen[pod.Name] = &podCounts{}
	}
	f(p.seen[pod.Name])
}

// of is what has been counted for a pod.
func (p *probe) of(pod string) podCounts {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if c := p.seen[pod]; c != nil {
		return *c
	}
	return podCounts{}
}

func (p *probe) Name() string { return probeName }

// EventsToRegister: the probe never rejects a pod in a way that an event could change.
func (p *probe) EventsToRegister(context.Context) ([]fwk.ClusterEventWithHint, error) {
	return nil, nil
}

// SignPod adds nothing, or the profile could not sign any pod.
func (p *probe) SignPod(context.Context, *v1.Pod) ([]fwk.SignFragment, *fwk.Status) { return nil, nil }

func (p *probe) PreFilter(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	p.count(pod, func(c *podCounts) { c.attempts++ })
	return nil, nil
}

func (p *probe) PreFilterExtensions() fwk.PreFilterExtensions { return p }

func (p *probe) AddPod(context.Context, fwk.CycleState, *v1.Pod, fwk.PodInfo, fwk.NodeInfo) *fwk.Status {
	return nil
}

func (p *probe) RemovePod(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ fwk.PodInfo, _ fwk.NodeInfo) *fwk.Status {
	p.count(pod, func(c *podCounts) { c.taken++ })
	return nil
}

// Filter runs only for nodes that all other plugins let pass.
func (p *probe) Filter(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ fwk.NodeInfo) *fwk.Status {
	p.count(pod, func(c *podCounts) { c.filtered++ })
	return nil
}

func (p *probe) Reserve(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) *fwk.Status {
	p.count(pod, func(c *podCounts) { c.reserved++ })
	return nil
}

func (p *probe) Unreserve(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) {
	if p.unreserve != nil {
		p.unreserve(pod)
	}
}

func (p *probe) Permit(ctx context.Context, _ fwk.CycleState, pod *v1.Pod, node string) (*fwk.Status, time.Duration) {
	if p.permit == nil {
		return nil, 0
	}
	return p.permit(ctx, pod, node)
}

func (p *probe) PreBindPreFlight(context.Context, fwk.CycleState, *v1.Pod, string) (*fwk.PreBindPreFlightResult, *fwk.Status) {
	if p.preBind == nil {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	return nil, nil
}

func (p *probe) PreBind(ctx context.Context, _ fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	if p.preBind == nil {
		return nil
	}
	return p.preBind(ctx, pod, node)
}
