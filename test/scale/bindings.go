// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// bindings knows when the pods that the scheduler is to bind were created and bound, as a watch of this program brings it.
type bindings struct {
	mu sync.Mutex
	// waiting are pods that are not bound yet.
	waiting map[types.NamespacedName]time.Time
	reasons map[types.NamespacedName]string
	bound   map[types.NamespacedName]binding
}

// binding is of one pod.
type binding struct {
	pod            types.NamespacedName
	created, bound time.Time
	refused        string // what the scheduler said before, if it did
}

func (b binding) took() time.Duration { return b.bound.Sub(b.created) }

// watchBindings follows the pods with the label phaseLabel until ctx ends.
func watchBindings(ctx context.Context, client kubernetes.Interface) (*bindings, error) {
	b := &bindings{
		waiting: map[types.NamespacedName]time.Time{}, reasons: map[types.NamespacedName]string{}, bound: map[types.NamespacedName]binding{},
	}
	ours := informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = phaseLabel })
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, ours)
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    b.see,
		UpdateFunc: func(_, pod any) { b.see(pod) },
	})
	if err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return b, ctx.Err()
}

// expect is called just before a pod is created.
func (b *bindings) expect(pod types.NamespacedName) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting[pod] = time.Now()
}

func (b *bindings) see(object any) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return
	}
	now := time.Now()
	key := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	b.mu.Lock()
	defer b.mu.Unlock()
	created, ok := b.waiting[key]
	if !ok {
		return
	}
	if pod.Spec.NodeName != "" {
		b.bound[key] = binding{pod: key, created: created, bound: now, refused: b.reasons[key]}
		delete(b.waiting, key)
		delete(b.reasons, key)
		return
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			b.reasons[key] = c.Reason + ": " + c.Message
		}
	}
}

// of returns the pod's binding.
func (b *bindings) of(pod types.NamespacedName) (binding, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	found, ok := b.bound[pod]
	return found, ok
}

// refused is why a pod waits, as the scheduler says.
func (b *bindings) refused(pod types.NamespacedName) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.reasons[pod]
}

// await waits until n of the pods are bound, and returns the bindings of all that are then.
func (b *bindings) await(ctx context.Context, pods []types.NamespacedName, n int, timeout time.Duration) ([]binding, error) {
	var all []binding
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, timeout, true, func(context.Context) (bool, error) {
		all = all[:0]
		for _, pod := range pods {
			if found, ok := b.of(pod); ok {
				all = append(all, found)
			}
		}
		return len(all) >= n, nil
	})
	if err == nil {
		return all, nil
	}
	var open []string
	for _, pod := range pods {
		if _, ok := b.of(pod); !ok {
			open = append(open, fmt.Sprintf("%s (%s)", pod, b.refused(pod)))
		}
	}
	const most = 10
	some := strings.Join(open[:min(most, len(open))], "; ")
	return all, fmt.Errorf("after %s %d of %d pods are bound, not: %s: %w", timeout, len(all), len(pods), some, err)
}

// quantile is the time below which the share q of the bindings took.
func quantile(all []binding, q float64) time.Duration {
	took := make([]time.Duration, len(all))
	for i, one := range all {
		took[i] = one.took()
	}
	slices.Sort(took)
	if len(took) == 0 {
		return 0
	}
	return took[min(int(q*float64(len(took))), len(took)-1)]
}

// span is the time from the first creation to the last binding.
func span(all []binding) time.Duration {
	if len(all) == 0 {
		return 0
	}
	first, last := all[0].created, all[0].bound
	for _, one := range all {
		if one.created.Before(first) {
			first = one.created
		}
		if one.bound.After(last) {
			last = one.bound
		}
	}
	return last.Sub(first)
}
