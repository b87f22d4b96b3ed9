// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"k8s.io/client-go/util/workqueue"
)

// writers is how many requests this program has under way.
const writers = 32

// populate makes everything that exists before the scheduler starts, and checks that the API has it.
func (b *bench) populate(ctx context.Context) error {
	begin := time.Now()
	for i := range namespaces {
		namespace := namespaceName(i)
		if err := b.cluster.CreateNamespace(ctx, namespace); err != nil {
			return err
		}
		for _, t := range append([]template{unsatisfiable}, templates...) {
			_, err := b.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, newTemplate(namespace, t), metav1.CreateOptions{})
			if err != nil {
				return fmt.Errorf("creating claim template %s/%s: %w", namespace, t.name, err)
			}
		}
	}
	b.say("making %d nodes with %d GPUs", b.size.Nodes, b.size.gpus())
	if err := atOnce(ctx, b.size.Nodes, b.makeNode); err != nil {
		return err
	}
	b.say("making %d claims and their pods, after %s", len(b.held), since(begin))
	if err := atOnce(ctx, len(b.held), func(ctx context.Context, i int) error { return b.makeHolding(ctx, &b.held[i]) }); err != nil {
		return err
	}
	pods := 0
	for i := range b.held {
		pods += len(b.held[i].pods)
	}
	b.figures.seconds("populate: everything", time.Since(begin))
	b.figures.number("populate: nodes", float64(b.size.Nodes), "")
	b.figures.number("populate: devices", float64(b.size.gpus()), "")
	b.figures.number("populate: slices", float64(b.size.gpus()/b.size.GPUsPerSlice), "")
	b.figures.number("populate: claims", float64(len(b.held)), "")
	b.figures.number("populate: bound pods with claims", float64(pods), "")
	return nil
}

func (b *bench) makeNode(ctx context.Context, i int) error {
	node := newNode(i)
	if _, err := b.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("creating node %s: %w", node.Name, err)
	}
	// Admission taints every new node as not ready, and no controller runs here that takes the taint away.
	untainted := []byte(`{"spec":{"taints":null}}`)
	if _, err := b.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, untainted, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("removing the taints of node %s: %w", node.Name, err)
	}
	for _, slice := range newSlices(i, b.size.GPUsPerSlice) {
		if _, err := b.client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating slice %s: %w", slice.Name, err)
		}
	}
	return nil
}

// makeHolding makes a claim and, if it is allocated, its pods on their node.
func (b *bench) makeHolding(ctx context.Context, h *holding) error {
	claims := b.client.ResourceV1().ResourceClaims(h.namespace)
	claim, err := claims.Create(ctx, newClaim(h), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating claim %s/%s: %w", h.namespace, h.name, err)
	}
	if !h.allocated() {
		return nil
	}
	claim.Status.Allocation = newAllocation(h)
	for _, name := range h.pods {
		pod := newPod(h.namespace, name, corev1.PodResourceClaim{ResourceClaimName: &h.name})
		pod.Spec.NodeName = nodeName(h.node)
		if pod, err = b.client.CoreV1().Pods(h.namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating pod %s/%s: %w", h.namespace, name, err)
		}
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, consumer(pod.Name, pod.UID))
	}
	if _, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("allocating claim %s/%s: %w", h.namespace, h.name, err)
	}
	return nil
}

// end plays the kubelet and the user of pods that are done: they have succeeded and are deleted, and so is their claim
// unless it was made from a template.
func (b *bench) end(ctx context.Context, r running) error {
	for _, pod := range r.pods {
		done := []byte(`{"status":{"phase":"Succeeded"}}`)
		pods := b.client.CoreV1().Pods(r.namespace)
		if _, err := pods.Patch(ctx, pod, types.MergePatchType, done, metav1.PatchOptions{}, "status"); err != nil {
			return fmt.Errorf("ending pod %s/%s: %w", r.namespace, pod, err)
		}
		if err := pods.Delete(ctx, pod, metav1.DeleteOptions{}); err != nil {
			return fmt.Errorf("deleting pod %s/%s: %w", r.namespace, pod, err)
		}
	}
	if r.claim == "" {
		return nil
	}
	err := retry.OnError(retry.DefaultBackoff, apierrors.IsConflict, func() error {
		return b.client.ResourceV1().ResourceClaims(r.namespace).Delete(ctx, r.claim, metav1.DeleteOptions{})
	})
	if err != nil {
		return fmt.Errorf("deleting claim %s/%s: %w", r.namespace, r.claim, err)
	}
	return nil
}

// atOnce calls fn for n pieces, some at a time, until the first error.
func atOnce(ctx context.Context, n int, fn func(context.Context, int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	workqueue.ParallelizeUntil(ctx, writers, n, func(i int) {
		if err := fn(ctx, i); err != nil {
			cancel(err)
		}
	})
	return context.Cause(ctx)
}

func since(begin time.Time) time.Duration { return time.Since(begin).Round(100 * time.Millisecond) }
