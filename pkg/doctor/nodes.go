// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"slices"
	"strings"

	appsapi "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"stowage.dev/stowage/pkg/clusterview"
)

// gpuLabels are those by which others say that a node has GPUs: GPU feature discovery, and clouds.
var gpuLabels = []string{"nvidia.com/gpu.present", "cloud.google.com/gke-accelerator", "feature.node.kubernetes.io/pci-10de.present"}

// wants tells whether a DaemonSet has a pod on a node.
func wants(d *appsapi.DaemonSet, node *v1.Node) bool {
	spec := &d.Spec.Template.Spec
	match, err := nodeaffinity.NewRequiredNodeAffinity(spec.NodeSelector, spec.Affinity).Match(node)
	return err == nil && match
}

// placing is what a DaemonSet selects nodes by.
func placing(d *appsapi.DaemonSet) string {
	spec := &d.Spec.Template.Spec
	if len(spec.NodeSelector) == 0 && spec.Affinity != nil {
		return "of its affinity"
	}
	return labels.FormatLabels(spec.NodeSelector)
}

// agentOn is the agent's pod on a node, and whether there should be one.
func (c *cluster) agentOn(node *v1.Node) (pod *v1.Pod, wanted bool) {
	for _, agent := range c.agents {
		if !wants(agent, node) {
			continue
		}
		wanted = true
		for _, p := range c.agentPods[agent][node.Name] {
			if pod == nil || ready(p) {
				pod = p
			}
		}
	}
	return pod, wanted
}

func (c *cluster) agentRuns() {
	for _, agent := range c.agents {
		do := "kubectl -n " + agent.Namespace + " describe pods, and their logs, say why."
		selected := 0
		var missing, unready []string
		for _, node := range c.s.Nodes {
			if !wants(agent, node) {
				continue
			}
			selected++
			switch pod, _ := c.agentOn(node); {
			case pod == nil && !c.older(node.CreationTimestamp):
			case pod == nil:
				missing = append(missing, node.Name)
			case !ready(pod) && c.older(pod.CreationTimestamp):
				unready = append(unready, node.Name)
			}
		}
		if selected == 0 {
			c.find(Error, daemonSetName(agent), "kubectl label node NODE "+placing(agent),
				"No node has the labels that it selects: %s", placing(agent))
		}
		if len(missing) > 0 {
			c.find(Error, daemonSetName(agent), "kubectl -n "+agent.Namespace+" describe daemonset "+agent.Name+
				": an event says what keeps its pods off.", "It has no pod on nodes: %s", some(missing))
		}
		if len(unready) > 0 {
			c.find(Error, daemonSetName(agent), do, "Its pods are not ready on nodes: %s", some(unready))
		}
	}
}

func (c *cluster) gpuNodes() {
	if len(c.agents) == 0 {
		return
	}
	with := nodesWithDevices(c.s, driver)
	var without []string
	for _, node := range c.s.Nodes {
		has := slices.ContainsFunc(gpuLabels, func(l string) bool { return node.Labels[l] != "" && node.Labels[l] != "false" })
		if node.Labels[v1.LabelOSStable] == "windows" || len(pluginsOn(node, driver)) > 0 { // the agent is for Linux; a device plugin offers them
			continue
		}
		if _, wanted := c.agentOn(node); has && !wanted && !slices.Contains(with, node.Name) {
			without = append(without, node.Name)
		}
	}
	if len(without) > 0 {
		selector := placing(c.agents[0])
		c.find(Warning, "nodes "+some(without), "kubectl label node NODE "+selector,
			"By their labels they have GPUs, and no label %s for the node agent: nobody offers these GPUs", selector)
	}
}

func (c *cluster) registration() {
	with := nodesWithDevices(c.s, driver) // another driver of the node, such as one of its network interfaces, says nothing of the agent
	for _, node := range c.s.Nodes {
		if pod, _ := c.agentOn(node); pod != nil && ready(pod) && !slices.Contains(with, node.Name) && c.older(pod.CreationTimestamp) {
			c.find(Error, "node "+node.Name, "kubectl -n "+pod.Namespace+" logs "+pod.Name+
				": it finds no GPUs, the kubelet does not know the plugin, or the API server refuses its slices.",
				"The node agent is ready, and no ResourceSlice has a device of the node")
		}
	}
}

// nodeCondition passes on what the agent says of the host: driver, container runtime with CDI, MIG
// manager and others (docs/prerequisites.md).
func (c *cluster) nodeCondition() {
	for _, node := range c.s.Nodes {
		for _, condition := range node.Status.Conditions {
			if condition.Type != "GPUsReady" {
				continue
			}
			_, notes, noted := strings.Cut(condition.Message, "; ")
			switch {
			case condition.Status != v1.ConditionTrue:
				c.find(Error, "node "+node.Name, "node-agent check on the node says more; docs/runbook.md says what to do about each reason.",
					"GPUsReady is %s, %s: %s", condition.Status, condition.Reason, condition.Message)
			case noted:
				c.find(Warning, "node "+node.Name, "node-agent check on the node says what to do.", "The node agent says: %s", notes)
			}
		}
	}
}

// imex looks for GPUs of one NVLink clique on several nodes. Memory is shared between nodes through IMEX channels alone.
func (c *cluster) imex() {
	nodes := map[string]map[string]bool{}
	for _, d := range c.devices {
		if d.Object == nil {
			continue
		}
		if strings.HasPrefix(d.Driver, "compute-domain.") || strings.Contains(d.ID.Device, "channel") {
			return
		}
		if clique := d.Text("nvlinkClique"); clique != "" {
			if nodes[clique] == nil {
				nodes[clique] = map[string]bool{}
			}
			nodes[clique][d.Node] = true
		}
	}
	for _, clique := range sortedKeys(nodes) {
		if len(nodes[clique]) > 1 {
			c.find(Warning, "clique "+clique, "Install a driver of IMEX channels, such as NVIDIA's compute-domain.nvidia.com.",
				"GPUs of %d nodes are in it, and nobody offers an IMEX channel: pods on them cannot share memory over NVLink: %s",
				len(nodes[clique]), some(sortedKeys(nodes[clique])))
		}
	}
}

// notStarted looks for pods that have a node and devices, and no container that runs.
func (c *cluster) notStarted() {
	for _, pod := range c.s.Pods {
		if pod.Spec.NodeName == "" || pod.Status.Phase != v1.PodPending || len(pod.Spec.ResourceClaims) == 0 || pod.DeletionTimestamp != nil ||
			!c.older(pod.CreationTimestamp) {
			continue
		}
		scheduled := slices.ContainsFunc(pod.Status.Conditions, func(p v1.PodCondition) bool {
			return p.Type == v1.PodScheduled && p.Status == v1.ConditionTrue && !c.older(p.LastTransitionTime)
		})
		prepared := slices.ContainsFunc(pod.Status.InitContainerStatuses, func(s v1.ContainerStatus) bool {
			return s.State.Running != nil || s.State.Terminated != nil || s.RestartCount > 0
		})
		if scheduled || prepared { // not for long; containers that fetch a model may take hours
			continue
		}
		c.find(Warning, "pod "+pod.Namespace+"/"+pod.Name, "kubectl stowage why "+pod.Name+" -n "+pod.Namespace+
			", and kubectl describe pod: events of the kubelet say what prepare answers.",
			"It has node %s and its devices, and its containers do not start", pod.Spec.NodeName)
	}
}

// holdersOf are the names of the claims that hold a device, and do not merely look at it.
func holdersOf(d *clusterview.Device) (names []string) {
	for i := range d.Holders {
		if !d.Holders[i].Admin {
			names = append(names, d.Holders[i].Namespace+"/"+d.Holders[i].Claim)
		}
	}
	return names
}
