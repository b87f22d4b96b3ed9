// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
)

const (
	namespace   = "bench"
	driver      = "gpu.bench.example"
	class       = "bench-gpu"
	gpusPerNode = 8
	writers     = 32 // requests at once while the world is made
	patience    = 2 * time.Minute
)

// world is a cluster with nodes, whose GPUs are half held.
type world struct {
	client kubernetes.Interface
	made   int // pods

	mutex sync.Mutex
	// waits are for pods that are not bound yet.
	waits map[string]chan struct{}
}

func newWorld(ctx context.Context, cluster *localcluster.Cluster, root string, nodes int) (*world, error) {
	if err := cluster.Apply(ctx, filepath.Join(root, "manifests", "base", "access")); err != nil {
		return nil, err
	}
	config := cluster.AdminConfig()
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	w := &world{client: client, waits: map[string]chan struct{}{}}
	if err := cluster.CreateNamespace(ctx, namespace); err != nil {
		return nil, err
	}
	// What kube-controller-manager would make.
	account := &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	if _, err := client.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if _, err := client.ResourceV1().DeviceClasses().Create(ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: class},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == %q", driver),
		}}}},
	}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	start := time.Now()
	if err := atOnce(ctx, writers, nodes, func(ctx context.Context, i int) error {
		return w.addNode(ctx, fmt.Sprintf("node-%d", i))
	}); err != nil {
		return nil, err
	}
	fmt.Fprintf(cluster.Progress(), "made %d nodes in %s\n", nodes, time.Since(start).Round(time.Second))
	return w, w.watch(ctx)
}

// addNode makes a node, its slice, and a claim that holds half of its GPUs.
func (w *world) addNode(ctx context.Context, name string) error {
	node := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: v1.NodeStatus{
			Allocatable: v1.ResourceList{
				v1.ResourceCPU: resource.MustParse("64"), v1.ResourceMemory: resource.MustParse("1Ti"), v1.ResourcePods: resource.MustParse("110"),
			},
			Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "Bench"}},
		},
	}
	if _, err := w.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	// Admission taints new nodes, and nobody is there to take the taint away.
	if _, err := w.client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(`{"spec":{"taints":null}}`),
		metav1.PatchOptions{}); err != nil {
		return err
	}
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
		},
	}
	holder := newClaim("holder-" + name)
	holder.Spec.Devices.Requests[0].Exactly.Count = gpusPerNode / 2
	holder.Finalizers = []string{resourceapi.Finalizer}
	allocation := &resourceapi.AllocationResult{}
	for i := range gpusPerNode {
		device := fmt.Sprintf("gpu-%d", i)
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{Name: device})
		if i < gpusPerNode/2 {
			allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
				Request: "gpu", Driver: driver, Pool: name, Device: device,
			})
		}
	}
	if _, err := w.client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return err
	}
	claims := w.client.ResourceV1().ResourceClaims(namespace)
	created, err := claims.Create(ctx, holder, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	created.Status.Allocation = allocation
	_, err = claims.UpdateStatus(ctx, created, metav1.UpdateOptions{})
	return err
}

func newClaim(name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			},
		}}}},
	}
}

// watch follows the pods until ctx ends.
func (w *world) watch(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(w.client, 0, informers.WithNamespace(namespace))
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    w.see,
		UpdateFunc: func(_, pod any) { w.see(pod) },
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return ctx.Err()
}

func (w *world) see(object any) {
	pod, ok := object.(*v1.Pod)
	if !ok || pod.Spec.NodeName == "" {
		return
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if wait := w.waits[pod.Name]; wait != nil {
		close(wait)
		delete(w.waits, pod.Name)
	}
}

// add makes a pod with a claim of its own. The channel is closed when it is bound.
func (w *world) add(ctx context.Context, name, scheduler string) (created time.Time, bound <-chan struct{}, err error) {
	if _, err := w.client.ResourceV1().ResourceClaims(namespace).Create(ctx, newClaim(name), metav1.CreateOptions{}); err != nil {
		return time.Time{}, nil, err
	}
	wait := make(chan struct{})
	w.mutex.Lock()
	w.waits[name] = wait
	w.mutex.Unlock()
	created = time.Now()
	_, err = w.client.CoreV1().Pods(namespace).Create(ctx, &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.PodSpec{
			SchedulerName:                scheduler,
			AutomountServiceAccountToken: ptr.To(false),
			ResourceClaims:               []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}},
			Containers: []v1.Container{{
				Name: "main", Image: "stowage.dev/probe:latest",
				Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu"}}},
			}},
		},
	}, metav1.CreateOptions{})
	return created, wait, err
}

var errNotBound = errors.New("not bound in time")

// bindOne makes a pod and returns how long it took until it was bound.
func (w *world) bindOne(ctx context.Context, scheduler string) (time.Duration, error) {
	w.made++
	created, bound, err := w.add(ctx, fmt.Sprintf("pod-%d", w.made), scheduler)
	if err != nil {
		return 0, err
	}
	if err := await(ctx, bound); err != nil {
		return 0, fmt.Errorf("pod-%d: %w", w.made, err)
	}
	return time.Since(created), nil
}

// bindMany makes n pods at once and returns how long it took until all were bound.
func (w *world) bindMany(ctx context.Context, scheduler string, n int) (time.Duration, error) {
	start := time.Now()
	first := w.made
	w.made += n
	err := atOnce(ctx, n, n, func(ctx context.Context, i int) error {
		name := fmt.Sprintf("pod-%d", first+i+1)
		_, bound, err := w.add(ctx, name, scheduler)
		if err != nil {
			return err
		}
		if err := await(ctx, bound); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	return time.Since(start), err
}

// atOnce calls fn for n pieces, so many at a time, until the first error.
func atOnce(ctx context.Context, limit, n int, fn func(context.Context, int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	workqueue.ParallelizeUntil(ctx, limit, n, func(i int) {
		if err := fn(ctx, i); err != nil {
			cancel(err)
		}
	})
	return context.Cause(ctx)
}

func await(ctx context.Context, bound <-chan struct{}) error {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-bound:
		return nil
	case <-timer.C:
		return errNotBound
	case <-ctx.Done():
		return ctx.Err()
	}
}
