// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/pkg/snapshot"
)

// State is how far a pod is.
type State string

const (
	// Waits: it has no node, and would get none now.
	Waits State = "waits"
	// Fits: it has no node yet, and there is one.
	Fits State = "fits"
	// Preparing: it has a node, and its containers are not created yet.
	Preparing State = "preparing"
	// Running: it has a node, and its containers were created.
	Running State = "running"
	// Deleting: it has no node, is being deleted, and no scheduler tries it.
	Deleting State = "deleting"
	// Ended: it has succeeded or failed.
	Ended State = "ended"
)

// Why is what a pod waits for, or why it has what it has.
type Why struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Scheduler string `json:"scheduler"`
	State     State  `json:"state"`
	Node      string `json:"node,omitempty"`
	// Claims are the pod's, in the order of its spec.
	Claims []ClaimStatus `json:"claims,omitempty"`
	// Outcome is what the scheduler would do with it now, if it has no node.
	Outcome *Outcome `json:"outcome,omitempty"`
	// Group is its pod group, and Obstacle the first member that has no place when all that wait are tried one after the other.
	Group    string   `json:"group,omitempty"`
	Obstacle *Outcome `json:"obstacle,omitempty"`
	// Placed are how many waiting members had a place before that, of Members.
	Placed  int `json:"placed,omitempty"`
	Members int `json:"members,omitempty"`
}

// ClaimStatus is a claim of a pod.
type ClaimStatus struct {
	Name    string         `json:"name"`
	Missing string         `json:"missing,omitempty"` // why there is no such claim
	Devices []DeviceStatus `json:"devices,omitempty"`
}

// DeviceStatus is an allocated device, and what its driver says of it.
type DeviceStatus struct {
	Device
	Ready   string `json:"ready,omitempty"` // True, False, Unknown; empty if nothing is said
	Message string `json:"message,omitempty"`
}

// Explain says why a pod waits, or what it has. The error is that there is no such pod, or about the simulation.
func Explain(ctx context.Context, objects *snapshot.Objects, namespace, name string, opts Options) (*Why, error) {
	i := slices.IndexFunc(objects.Pods, func(p *v1.Pod) bool { return p.Namespace == namespace && p.Name == name })
	if i < 0 {
		return nil, noPod(objects, namespace, name)
	}
	pod := objects.Pods[i]
	why := &Why{Namespace: namespace, Pod: name, Scheduler: pod.Spec.SchedulerName, Node: pod.Spec.NodeName, Claims: claimsOf(objects, pod)}
	if group := pod.Spec.SchedulingGroup; group != nil && group.PodGroupName != nil {
		why.Group = *group.PodGroupName
	}
	switch {
	case isOver(pod):
		why.State = Ended
		return why, nil
	case pod.Spec.NodeName != "":
		why.State = Preparing
		if pod.Status.Phase == v1.PodRunning {
			why.State = Running
		}
		return why, nil
	case pod.DeletionTimestamp != nil:
		why.State = Deleting
		return why, nil
	}
	p, err := newPlacing(ctx, NewChange(objects), opts)
	if err != nil {
		return nil, err
	}
	defer p.close()
	if why.Group != "" {
		if err := why.tryGroup(ctx, p, objects); err != nil {
			return nil, err
		}
		if why.Outcome != nil {
			return why, nil
		}
	}
	out, err := p.schedule(ctx, pod)
	if err != nil {
		return nil, err
	}
	why.judge(out)
	return why, nil
}

// noPod says where pods of that name are.
func noPod(objects *snapshot.Objects, namespace, name string) error {
	var elsewhere []string
	for _, pod := range objects.Pods {
		if pod.Name == name {
			elsewhere = append(elsewhere, "-n "+pod.Namespace)
		}
	}
	if len(elsewhere) == 0 {
		return fmt.Errorf("pod %s/%s: there is none", namespace, name)
	}
	return fmt.Errorf("pod %s/%s: there is none; there is one with %s", namespace, name, strings.Join(elsewhere, " or "))
}

func (w *Why) judge(out *Outcome) {
	w.Outcome, w.State = out, Waits
	if out.Node != "" {
		w.State = Fits
	}
}

// tryGroup tries all waiting members one after the other, until one has no place.
func (w *Why) tryGroup(ctx context.Context, p *placing, objects *snapshot.Objects) error {
	var members []*v1.Pod
	for _, pod := range Waiting(objects) {
		if g := pod.Spec.SchedulingGroup; pod.Namespace == w.Namespace && g != nil && g.PodGroupName != nil && *g.PodGroupName == w.Group {
			members = append(members, pod)
		}
	}
	w.Members = len(members)
	for _, member := range members {
		out, err := p.schedule(ctx, member)
		if err != nil {
			return err
		}
		if member.Name == w.Pod {
			w.judge(out)
		}
		if out.Node == "" {
			w.Obstacle, w.State = out, Waits
			return nil
		}
		w.Placed++
	}
	return nil
}

// claimsOf are the pod's claims with their devices.
func claimsOf(objects *snapshot.Objects, pod *v1.Pod) (claims []ClaimStatus) {
	names := []string{}
	for i := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		switch {
		case err != nil:
			claims = append(claims, ClaimStatus{Name: pod.Spec.ResourceClaims[i].Name, Missing: unmade(objects, pod, i, err)})
		case name != nil:
			names = append(names, *name)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, extended.ResourceClaimName)
	}
	for _, name := range names {
		i := slices.IndexFunc(objects.ResourceClaims,
			func(c *resourceapi.ResourceClaim) bool { return c.Namespace == pod.Namespace && c.Name == name })
		if i < 0 {
			claims = append(claims, ClaimStatus{Name: name, Missing: "there is no such ResourceClaim"})
			continue
		}
		claims = append(claims, statusOf(objects.ResourceClaims[i]))
	}
	return claims
}

// unmade is why a claim has not been made from its template.
func unmade(objects *snapshot.Objects, pod *v1.Pod, i int, err error) string {
	template := pod.Spec.ResourceClaims[i].ResourceClaimTemplateName
	if template != nil && !slices.ContainsFunc(objects.ResourceClaimTemplates, func(t *resourceapi.ResourceClaimTemplate) bool {
		return t.Namespace == pod.Namespace && t.Name == *template
	}) {
		return "there is no ResourceClaimTemplate " + *template
	}
	return err.Error()
}

func statusOf(claim *resourceapi.ResourceClaim) ClaimStatus {
	status := ClaimStatus{Name: claim.Name}
	if claim.Status.Allocation == nil {
		return status
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		d := DeviceStatus{Device: Device{claim.Name, r.Request, r.Driver, r.Pool, r.Device}}
		for _, told := range claim.Status.Devices {
			if told.Driver != r.Driver || told.Pool != r.Pool || told.Device != r.Device {
				continue
			}
			var others []string
			for _, condition := range told.Conditions {
				if condition.Type == "Ready" {
					d.Ready, d.Message = string(condition.Status), condition.Message
				} else if condition.Status != metav1.ConditionTrue {
					others = append(others, condition.Type+": "+condition.Message)
				}
			}
			if d.Message == "" {
				d.Message = strings.Join(others, "; ")
			}
		}
		status.Devices = append(status.Devices, d)
	}
	return status
}
