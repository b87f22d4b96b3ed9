// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// attemptTimeout bounds one request; the API server may be away.
const attemptTimeout = 5 * time.Second

// owner plays the users and the kubelets: it makes pods, lets them run when they
// are bound, ends and deletes them. It works on through every trouble.
type owner struct {
	client    kubernetes.Interface
	namespace string
	log       io.Writer
	wg        sync.WaitGroup
}

// createTemplates makes one claim template of each kind.
func (o *owner) createTemplates(ctx context.Context) error {
	for name, spec := range specs {
		_, err := o.client.ResourceV1().ResourceClaimTemplates(o.namespace).Create(ctx, newTemplate(name, spec), metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("creating claim template %s: %w", name, err)
		}
	}
	return nil
}

// arrive creates what comes at once, and has it deleted when its owners lose
// patience.
func (o *owner) arrive(ctx context.Context, a arrival) {
	if a.shared != nil {
		o.insist(ctx, "creating claim "+a.shared.Name, func(ctx context.Context) error {
			_, err := o.client.ResourceV1().ResourceClaims(o.namespace).Create(ctx, a.shared, metav1.CreateOptions{})
			return ignore(err, apierrors.IsAlreadyExists) // the answer to an earlier attempt was lost
		})
	}
	for _, p := range a.pods {
		o.create(ctx, p.pod)
		if p.patience > 0 {
			o.wg.Go(func() {
				pause(ctx, p.patience)
				o.delete(ctx, p.pod.Name)
			})
		}
	}
}

func (o *owner) create(ctx context.Context, pod *corev1.Pod) {
	o.insist(ctx, "creating pod "+pod.Name, func(ctx context.Context) error {
		_, err := o.client.CoreV1().Pods(o.namespace).Create(ctx, pod, metav1.CreateOptions{})
		return ignore(err, apierrors.IsAlreadyExists)
	})
}

// run plays the kubelet of a pod that has just been bound.
func (o *owner) run(ctx context.Context, p podPlan) {
	o.wg.Go(func() {
		o.setPhase(ctx, p.pod.Name, corev1.PodRunning)
		pause(ctx, p.hold)
		if !p.deleted {
			o.setPhase(ctx, p.pod.Name, corev1.PodSucceeded)
		}
		o.delete(ctx, p.pod.Name)
	})
}

func (o *owner) setPhase(ctx context.Context, pod string, phase corev1.PodPhase) {
	patch := fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase)
	o.insist(ctx, fmt.Sprintf("reporting pod %s as %s", pod, phase), func(ctx context.Context) error {
		_, err := o.client.CoreV1().Pods(o.namespace).Patch(ctx, pod, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		return ignore(err, apierrors.IsNotFound) // deleted meanwhile
	})
}

func (o *owner) delete(ctx context.Context, pod string) {
	o.insist(ctx, "deleting pod "+pod, func(ctx context.Context) error {
		err := o.client.CoreV1().Pods(o.namespace).Delete(ctx, pod, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
		return ignore(err, apierrors.IsNotFound)
	})
}

// deleteClaims deletes the claims that nobody made from a template. Their
// finalizer lets them go when they have been released.
func (o *owner) deleteClaims(ctx context.Context) {
	o.insist(ctx, "deleting shared claims", func(ctx context.Context) error {
		return o.client.ResourceV1().ResourceClaims(o.namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	})
}

// insist tries until it works or ctx ends: what users and kubelets do, too.
func (o *owner) insist(ctx context.Context, doing string, try func(context.Context) error) {
	backoff := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 1 << 30, Cap: 2 * time.Second}
	var last error
	err := backoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
		last = try(ctx)
		return last == nil, nil
	})
	if err != nil && last != nil {
		fmt.Fprintf(o.log, "%s: %v\n", doing, last)
	}
}

func ignore(err error, expected func(error) bool) error {
	if expected(err) {
		return nil
	}
	return err
}

// pause waits for a time, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
