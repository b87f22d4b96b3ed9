// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	appsapi "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot"
)

const (
	// driver is the name under which Stowage's agent publishes, as NVIDIA's driver does.
	driver = "gpu.nvidia.com"
	// patience is how long something may be on its way before it is a fault.
	patience = 5 * time.Minute
	// maxNamed bounds how many objects a finding names.
	maxNamed = 5
)

// cluster is a snapshot with what several checks need of it.
type cluster struct {
	s *snapshot.Snapshot
	// in is never nil.
	in         *snapshot.Installation
	devices    []*clusterview.Device
	nodes      map[string]*v1.Node
	schedulers []*scheduler
	agents     []*appsapi.DaemonSet
	// agentPods are the agents' pods by node.
	agentPods map[*appsapi.DaemonSet]map[string][]*v1.Pod

	// check is the one that runs.
	check    string
	findings []Finding
}

func newCluster(s *snapshot.Snapshot) *cluster {
	c := &cluster{
		s: s, in: s.Installation, devices: clusterview.Devices(s), nodes: map[string]*v1.Node{},
		agentPods: map[*appsapi.DaemonSet]map[string][]*v1.Pod{},
	}
	if c.in == nil {
		c.in = &snapshot.Installation{}
	}
	for _, node := range s.Nodes {
		c.nodes[node.Name] = node
	}
	for _, d := range c.in.Deployments {
		c.schedulers = append(c.schedulers, readScheduler(d, c.in.ConfigMaps))
	}
	for _, d := range c.in.DaemonSets {
		if isAgent(d) {
			c.agents = append(c.agents, d)
			on := map[string][]*v1.Pod{}
			for _, pod := range podsOf(s, d.Namespace, d.Spec.Selector) {
				on[pod.Spec.NodeName] = append(on[pod.Spec.NodeName], pod)
			}
			c.agentPods[d] = on
		}
	}
	return c
}

// isAgent tells a node agent from other DaemonSets, whatever it is called.
func isAgent(d *appsapi.DaemonSet) bool {
	return d.Name == "stowage-node-agent" || d.Labels["app.kubernetes.io/name"] == "stowage-node-agent" ||
		slices.ContainsFunc(d.Spec.Template.Spec.Containers,
			func(c v1.Container) bool { return strings.Contains(c.Image, "stowage.dev/node-agent") })
}

func (c *cluster) find(severity Severity, object, do, problem string, args ...any) {
	c.findings = append(c.findings,
		Finding{Severity: severity, Check: c.check, Object: object, Do: do, Problem: fmt.Sprintf(problem, args...)})
}

// older tells whether something has been so for longer than it takes to come about.
func (c *cluster) older(since metav1.Time) bool { return c.s.Taken.Sub(since.Time) > patience }

// installed tells whether anything of Stowage is seen in the cluster.
func (c *cluster) installed() bool {
	return len(c.agents) > 0 || slices.ContainsFunc(c.schedulers, func(s *scheduler) bool { return s.ours })
}

// podsOf are the pods that a workload's selector takes.
func podsOf(s *snapshot.Snapshot, namespace string, selector *metav1.LabelSelector) (pods []*v1.Pod) {
	matches, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return nil
	}
	for _, pod := range s.Pods {
		if pod.Namespace == namespace && matches.Matches(labels.Set(pod.Labels)) {
			pods = append(pods, pod)
		}
	}
	return pods
}

// ready tells whether a pod serves.
func ready(pod *v1.Pod) bool {
	return pod.DeletionTimestamp == nil && slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
	})
}

// some names a few of many.
func some(names []string) string {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	if len(names) <= maxNamed {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNamed], ", "), len(names)-maxNamed)
}

func deploymentName(d *appsapi.Deployment) string { return "deployment " + d.Namespace + "/" + d.Name }

func daemonSetName(d *appsapi.DaemonSet) string { return "daemonset " + d.Namespace + "/" + d.Name }

// account is the ServiceAccount of a pod template.
func account(template *v1.PodTemplateSpec) string {
	return cmp.Or(template.Spec.ServiceAccountName, "default")
}

// tagOf is the tag, or the digest, of the first container's image.
func tagOf(template *v1.PodTemplateSpec) string {
	if len(template.Spec.Containers) == 0 {
		return ""
	}
	image := template.Spec.Containers[0].Image
	image, digest, _ := strings.Cut(image, "@")
	if i := strings.LastIndex(image, ":"); i > strings.LastIndex(image, "/") {
		return image[i+1:]
	}
	return digest
}
