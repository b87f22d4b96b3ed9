// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// bindTimeout is how long pods may wait for which there is room, on a machine that does much else.
	bindTimeout = 10 * time.Minute
	// waitingPods is how many pods wait all the time for what no node has.
	waitingPods = 10
)

// start starts the scheduler for the first time; a pod waits for it.
func (b *bench) start(ctx context.Context) error {
	first, err := b.submit(ctx, "start", 1)
	if err != nil {
		return err
	}
	at, err := b.startScheduler(ctx)
	if err != nil {
		return err
	}
	bound, err := b.bindings.await(ctx, first, 1, bindTimeout)
	if err != nil {
		return err
	}
	b.figures.seconds("start: ready after", at.ready.Sub(at.begin))
	b.figures.seconds("start: first binding after", bound[0].bound.Sub(at.begin))
	return b.measureMemory(ctx, "start")
}

// burst gives the scheduler many pods at once, and some that wait for ever.
func (b *bench) burst(ctx context.Context) error {
	if err := b.submitWaiting(ctx); err != nil {
		return err
	}
	before, err := cpuNow()
	if err != nil {
		return err
	}
	pods, err := b.submit(ctx, "burst", b.Burst)
	if err != nil {
		return err
	}
	bound, err := b.bindings.await(ctx, pods, len(pods), bindTimeout)
	if err != nil {
		return err
	}
	after, err := cpuNow()
	if err != nil {
		return err
	}
	used := after.of(b.scheduler.Pid()) - before.of(b.scheduler.Pid())
	b.figures.number("burst: pods", float64(len(pods)), "")
	b.figures.number("burst: pods bound per second", float64(len(pods))/span(bound).Seconds(), "")
	b.latencies("burst", bound)
	b.figures.number("burst: processor time of the scheduler per pod", 1000*used.Seconds()/float64(len(pods)), "ms")
	return b.measureMemory(ctx, "burst")
}

// churn ends pods and gives the scheduler others, so many a second.
func (b *bench) churn(ctx context.Context) error {
	var ending sync.WaitGroup
	defer ending.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	var pods []types.NamespacedName
	begin := time.Now()
	ended := 0
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for time.Since(begin) < b.Churn {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
		for range min(b.Rate, len(b.running)) {
			r := b.takeRunning()
			ended += len(r.pods)
			ending.Go(func() {
				if err := b.end(ctx, r); err != nil {
					cancel(err)
				}
			})
		}
		more, err := b.submit(ctx, "churn", b.Rate)
		if err != nil {
			return err
		}
		pods = append(pods, more...)
	}
	bound, err := b.bindings.await(ctx, pods, len(pods), bindTimeout)
	if err != nil {
		return err
	}
	ending.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	b.figures.number("churn: pods that came", float64(len(pods)), "")
	b.figures.number("churn: pods that ended", float64(ended), "")
	b.latencies("churn", bound)
	return b.measureMemory(ctx, "churn")
}

// restart kills the scheduler while it binds pods, and starts it again.
func (b *bench) restart(ctx context.Context) error {
	if err := b.measureProcess(ctx, "first scheduler"); err != nil {
		return err
	}
	pods, err := b.submit(ctx, "restart", max(3, b.Burst/4))
	if err != nil {
		return err
	}
	if _, err := b.bindings.await(ctx, pods, 1, bindTimeout); err != nil {
		return err
	}
	if err := b.scheduler.Kill(); err != nil {
		return err
	}
	killed := time.Now()
	late, err := b.submit(ctx, "restart", 1)
	if err != nil {
		return err
	}
	at, err := b.startScheduler(ctx)
	if err != nil {
		return err
	}
	bound, err := b.bindings.await(ctx, append(pods, late...), len(pods)+1, bindTimeout)
	if err != nil {
		return err
	}
	bound = slices.DeleteFunc(bound, func(one binding) bool { return one.bound.Before(at.begin) })
	first := slices.MinFunc(bound, func(x, y binding) int { return x.bound.Compare(y.bound) })
	b.figures.number("restart: pods that were not bound when it was killed", float64(len(bound)-1), "")
	b.figures.seconds("restart: ready after", at.ready.Sub(at.begin))
	b.figures.seconds("restart: lease of the killed one taken after", at.leading.Sub(killed))
	b.figures.seconds("restart: first binding after", first.bound.Sub(at.begin))
	return b.measureProcess(ctx, "second scheduler")
}

// submit creates pods that the scheduler can bind, with claims from templates.
func (b *bench) submit(ctx context.Context, phase string, n int) ([]types.NamespacedName, error) {
	kinds := make([]template, n)
	for i := range kinds {
		kinds[i] = b.anyTemplate()
	}
	pods, err := b.create(ctx, phase, kinds)
	for i, pod := range pods {
		b.alive[pod] = kinds[i].count
		b.running = append(b.running, running{namespace: pod.Namespace, pods: []string{pod.Name}})
	}
	return pods, err
}

// submitWaiting creates pods that no node fits, and waits until the scheduler has said so.
func (b *bench) submitWaiting(ctx context.Context) (err error) {
	if b.waiting, err = b.create(ctx, "waiting", slices.Repeat([]template{unsatisfiable}, waitingPods)); err != nil {
		return err
	}
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, bindTimeout, true, func(context.Context) (bool, error) {
		return !slices.ContainsFunc(b.waiting, func(pod types.NamespacedName) bool { return b.bindings.refused(pod) == "" }), nil
	})
	if err != nil {
		return fmt.Errorf("waiting until the scheduler has refused %d pods: %w", waitingPods, err)
	}
	b.say("refused is pod %s, %s", b.waiting[0], b.bindings.refused(b.waiting[0]))
	return nil
}

// create creates a pod of each kind.
func (b *bench) create(ctx context.Context, phase string, kinds []template) ([]types.NamespacedName, error) {
	pods := make([]types.NamespacedName, len(kinds))
	for i := range pods {
		pods[i] = types.NamespacedName{Namespace: namespaceName(b.made), Name: fmt.Sprintf("%s-%05d", phase, b.made)}
		b.made++
	}
	return pods, atOnce(ctx, len(pods), func(ctx context.Context, i int) error {
		pod := newPod(pods[i].Namespace, pods[i].Name, corev1.PodResourceClaim{ResourceClaimTemplateName: &kinds[i].name})
		pod.Labels = map[string]string{phaseLabel: phase}
		b.bindings.expect(pods[i])
		if _, err := b.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating pod %s: %w", pods[i], err)
		}
		return nil
	})
}

func (b *bench) anyTemplate() template {
	total := 0
	for _, t := range templates {
		total += t.weight
	}
	at := b.random.IntN(total)
	for _, t := range templates {
		if at < t.weight {
			return t
		}
		at -= t.weight
	}
	panic("unreachable: the weights' sum")
}

// takeRunning returns pods that run, which are not to be there any more.
func (b *bench) takeRunning() running {
	for {
		i := b.random.IntN(len(b.running))
		r := b.running[i]
		if r.claim == "" {
			if _, ok := b.bindings.of(types.NamespacedName{Namespace: r.namespace, Name: r.pods[0]}); !ok {
				continue // it does not run yet
			}
		}
		b.running = slices.Delete(b.running, i, i+1)
		for _, pod := range r.pods {
			delete(b.alive, types.NamespacedName{Namespace: r.namespace, Name: pod})
		}
		return r
	}
}

func (b *bench) latencies(phase string, bound []binding) {
	b.figures.seconds(phase+": created to bound, median", quantile(bound, 0.5))
	b.figures.seconds(phase+": created to bound, 99th percentile", quantile(bound, 0.99))
	slowest := slices.MaxFunc(bound, func(x, y binding) int { return cmp.Compare(x.took(), y.took()) })
	b.say("the slowest was pod %s after %s, refused before: %q", slowest.pod, slowest.took().Round(time.Millisecond), slowest.refused)
}

// measureMemory says what the scheduler has now.
func (b *bench) measureMemory(ctx context.Context, phase string) error {
	m, err := b.metrics(ctx)
	if err != nil {
		return err
	}
	b.figures.mebibytes(phase+": scheduler's memory", m.Sum("process_resident_memory_bytes"))
	b.figures.mebibytes(phase+": scheduler's heap", m.Sum("go_memstats_heap_alloc_bytes"))
	return nil
}

// measureProcess says what a scheduler has used in its life.
func (b *bench) measureProcess(ctx context.Context, name string) error {
	peak, err := peakMemory(b.scheduler.Pid())
	if err != nil {
		return err
	}
	m, err := b.metrics(ctx)
	if err != nil {
		return err
	}
	b.figures.mebibytes(name+": most memory", float64(peak))
	b.figures.seconds(name+": processor time", time.Duration(m.Sum("process_cpu_seconds_total")*float64(time.Second)))
	b.figures.number(name+": time that requests waited for client-side limits", m.Sum("rest_client_rate_limiter_duration_seconds"), "s")
	for _, result := range []string{"unschedulable", "error"} {
		b.figures.number(name+": attempts that ended as "+result, m.Sum("scheduler_schedule_attempts_total", "result", result), "")
	}
	return nil
}
