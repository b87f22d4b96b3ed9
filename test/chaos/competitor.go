// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/test/chaos/audit"
)

const competitorPrefix = "competitor-"

// ownershipLabel stands on the rules with which our schedulers own devices.
const ownershipLabel = "stowage.dev/owned-by"

// grantOwnership lets our schedulers change the rules of their own profiles: the
// shipped role names those of the shipped profiles alone.
func (b *bench) grantOwnership(ctx context.Context) error {
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "chaos-ownership"},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{resourceapi.GroupName}, Resources: []string{"devicetaintrules"}, Verbs: []string{"update", "delete"},
		}},
	}
	for _, p := range new(chaos).all() {
		for i := range p.ours {
			role.Rules[0].ResourceNames = append(role.Rules[0].ResourceNames, "stowage-owned-by-"+p.profile(i))
		}
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "stowage-system", Name: "stowage-scheduler"}},
	}
	access := b.cluster.AdminClient().RbacV1()
	if _, err := access.ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("granting the rules of the profiles: %w", err)
	}
	if _, err := access.ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("granting the rules of the profiles: %w", err)
	}
	return nil
}

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
	err := b.cluster.AdminClient().ResourceV1().DeviceTaintRules().
		DeleteCollection(context.WithoutCancel(ctx), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: ownershipLabel})
	if err != nil {
		return fmt.Errorf("removing the rules that keep other schedulers off: %w", err)
	}
	return nil
}

// competitors are pods for kube-scheduler that want the devices of our pool, at
// any time one with each kind of claim. One after the other is replaced when
// kube-scheduler has refused it, so that it tries all the time, also when devices
// have just been freed and when it has just been started.
type competitors struct {
	load    *load // makes pods
	kinds   []template
	present map[template]string // names of pods
	made    int
}

func newCompetitors(namespace string) *competitors {
	return &competitors{
		load: &load{namespace: namespace}, kinds: slices.Sorted(maps.Keys(specs)), present: map[template]string{},
	}
}

// claims is how many claims they have had, of one each.
func (c *competitors) claims() int {
	if c == nil {
		return 0
	}
	return c.made
}

// takeTurns makes those that are missing, and replaces the first of the others that was refused.
func (c *competitors) takeTurns(ctx context.Context, r *run) {
	if c == nil {
		return
	}
	for i, kind := range c.kinds {
		pod := r.history.Pods()[audit.Key{Namespace: r.phase.name, Name: c.present[kind]}]
		if pod == nil || !refused(pod) {
			continue
		}
		name := c.present[kind]
		delete(c.present, kind)
		r.owner.wg.Go(func() { r.owner.delete(ctx, name) })
		c.kinds = append(slices.Delete(c.kinds, i, i+1), kind)
		break
	}
	for _, kind := range c.kinds {
		if c.present[kind] == "" {
			c.made++
			name := fmt.Sprintf("%s%s-%d", competitorPrefix, kind, c.made)
			c.present[kind] = name
			r.owner.wg.Go(func() { r.owner.create(ctx, c.load.newPod(name, corev1.DefaultSchedulerName, kind)) })
		}
	}
}

// dismissCompetitors checks that kube-scheduler has tried each of its pods and
// found no device for it, and deletes them.
func (r *run) dismissCompetitors(ctx context.Context) error {
	r.trouble.wg.Wait() // it may be down
	var last []string
	err := r.wait(ctx, "kube-scheduler has not refused its pods, one of each kind", func() (open []string) {
		last = nil
		for key, pod := range r.history.Pods() {
			switch {
			case !isCompetitor(key):
			case refused(pod):
				last = append(last, key.Name)
			default:
				open = append(open, r.whyWaiting(key.Name))
			}
		}
		if len(open) == 0 && len(last) != len(specs) { // the last ones are being made or deleted
			open = append(open, fmt.Sprintf("there are %d instead of %d: %s", len(last), len(specs), strings.Join(last, ", ")))
		}
		return open
	})
	if err != nil {
		return err
	}
	for _, name := range last {
		r.owner.delete(ctx, name)
	}
	fmt.Fprintf(r.out, "kube-scheduler was refused %d pods\n", r.competitors.made)
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
