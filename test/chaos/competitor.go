package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/test/chaos/audit"
)

const competitorPrefix = "competitor-"

// ownershipLabel stands on the rules with which our schedulers own devices.
const ownershipLabel = "stowage.dev/owned-by"

// awaitOwnership waits until each of n schedulers has made its rule. A
// kube-scheduler that is started later knows the rules from its first look.
func (b *bench) awaitOwnership(ctx context.Context, n int) error {
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, settleTimeout, true, func(ctx context.Context) (bool, error) {
		rules, err := b.cluster.AdminClient().ResourceV1().DeviceTaintRules().List(ctx, metav1.ListOptions{LabelSelector: ownershipLabel})
		return err == nil && len(rules.Items) == n, err
	})
	if err != nil {
		return fmt.Errorf("waiting for %d rules that keep other schedulers off: %w", n, err)
	}
	return nil
}

// endOwnership removes the rules, as the schedulers that could are gone.
func (b *bench) endOwnership(ctx context.Context) error {
	err := b.cluster.AdminClient().ResourceV1().DeviceTaintRules().DeleteCollection(context.WithoutCancel(ctx), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: ownershipLabel})
	if err != nil {
		return fmt.Errorf("removing the rules that keep other schedulers off: %w", err)
	}
	return nil
}

// competitors are pods for kube-scheduler that want the devices of our pool, one
// with each kind of claim.
func competitors(namespace string) []*corev1.Pod {
	l := &load{namespace: namespace}
	var pods []*corev1.Pod
	for name := range specs {
		pods = append(pods, l.newPod(competitorPrefix+string(name), corev1.DefaultSchedulerName, name))
	}
	return pods
}

// dismissCompetitors checks that kube-scheduler has tried each of its pods and
// found no device for it, and deletes them.
func (r *run) dismissCompetitors(ctx context.Context) error {
	err := r.wait(ctx, "kube-scheduler has not refused its pods", func() (open []string) {
		for key, pod := range r.history.Pods() {
			if isCompetitor(key) && !refused(pod) {
				open = append(open, r.whyWaiting(key.Name))
			}
		}
		return open
	})
	if err != nil {
		return err
	}
	n := 0
	for key := range r.history.Pods() {
		if isCompetitor(key) {
			n++
			r.owner.delete(ctx, key.Name)
		}
	}
	if n != len(specs) {
		return fmt.Errorf("kube-scheduler had %d pods, want %d", n, len(specs))
	}
	return nil
}

func isCompetitor(key audit.Key) bool { return strings.HasPrefix(key.Name, competitorPrefix) }

// refused tells whether a scheduler has found no node for the pod.
func refused(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return true
		}
	}
	return false
}
