// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	appsapi "k8s.io/api/apps/v1"
	coordinationapi "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	configscheme "k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/pkg/plugins/ownership"
	"stowage.dev/stowage/pkg/snapshot"
)

// inTree is kube-scheduler's own plugin for claims.
const inTree = "DynamicResources"

// scheduler is a Deployment that runs one.
type scheduler struct {
	*appsapi.Deployment
	// ours: it is Stowage's.
	ours bool
	// file is the name of its configuration, config what is in it, nil if it could not be read, and problem why it is not valid.
	file    string
	config  *schedulerconfig.KubeSchedulerConfiguration
	problem string
}

// readScheduler finds a scheduler's configuration.
func readScheduler(d *appsapi.Deployment, configurations []*v1.ConfigMap) *scheduler {
	s := &scheduler{Deployment: d}
	named := func(text string) bool { return strings.Contains(text, "stowage") }
	s.ours = named(d.Labels["app.kubernetes.io/name"]) || named(d.Name)
	for _, container := range d.Spec.Template.Spec.Containers {
		s.ours = s.ours || named(container.Image)
		if file := snapshot.SchedulerConfigFile(&container); file != "" {
			s.file = path.Base(file)
		}
	}
	for _, volume := range d.Spec.Template.Spec.Volumes {
		for _, m := range configurations {
			if volume.ConfigMap == nil || m.Namespace != d.Namespace || m.Name != volume.ConfigMap.Name {
				continue
			}
			key := s.file
			for _, item := range volume.ConfigMap.Items {
				if path.Base(item.Path) == s.file {
					key = item.Key
				}
			}
			if content, ok := m.Data[key]; ok {
				s.decode(content)
				s.ours = s.ours || s.hasClaims()
			}
		}
	}
	return s
}

func (s *scheduler) decode(content string) {
	object, _, err := configscheme.Codecs.UniversalDecoder().Decode([]byte(content), nil, nil)
	if err != nil {
		s.problem = err.Error()
		return
	}
	read, ok := object.(*schedulerconfig.KubeSchedulerConfiguration)
	if !ok {
		s.problem = fmt.Sprintf("it is a %T, want a KubeSchedulerConfiguration", object)
		return
	}
	s.config = read
}

func (s *scheduler) String() string { return deploymentName(s.Deployment) }

// enables tells whether a profile has a plugin in multiPoint or in Filter.
func enables(p *schedulerconfig.KubeSchedulerProfile, name string) bool {
	if p.Plugins == nil {
		return false
	}
	is := func(plugin schedulerconfig.Plugin) bool { return plugin.Name == name }
	return slices.ContainsFunc(p.Plugins.MultiPoint.Enabled, is) || slices.ContainsFunc(p.Plugins.Filter.Enabled, is)
}

// hasClaims tells whether a profile has our plugin.
func (s *scheduler) hasClaims() bool {
	return s.config != nil && slices.ContainsFunc(s.config.Profiles, func(p schedulerconfig.KubeSchedulerProfile) bool {
		return enables(&p, deviceclaims.Name)
	})
}

// argumentsOf are those of our plugin in a profile.
func argumentsOf(p *schedulerconfig.KubeSchedulerProfile) *config.DeviceClaimsArgs {
	for _, entry := range p.PluginConfig {
		if args, ok := entry.Args.(*config.DeviceClaimsArgs); ok {
			return args
		}
	}
	return nil
}

// unfenced are the profiles with our plugin that do not pass the fence. Its default is to be enabled.
func (s *scheduler) unfenced() (names []string) {
	for i := range s.config.Profiles {
		p := &s.config.Profiles[i]
		if args := argumentsOf(p); enables(p, deviceclaims.Name) && args != nil && args.Fence != nil && !ptr.Deref(args.Fence.Enabled, true) {
			names = append(names, p.SchedulerName)
		}
	}
	return names
}

// apart tells whether two processes may schedule at the same time: they do not wait for one lease.
func apart(a, b *scheduler) bool {
	x, y := a.config.LeaderElection, b.config.LeaderElection
	return !x.LeaderElect || !y.LeaderElect || x.ResourceNamespace != y.ResourceNamespace || x.ResourceName != y.ResourceName
}

// running are the schedulers with our plugin whose configuration is known.
func (c *cluster) running() (all []*scheduler) {
	for _, s := range c.schedulers {
		if s.hasClaims() && ptr.Deref(s.Spec.Replicas, 1) > 0 {
			all = append(all, s)
		}
	}
	return all
}

func (c *cluster) schedulerRuns() {
	found := false
	for _, s := range c.schedulers {
		if !s.ours {
			continue
		}
		found = true
		wanted, ready := ptr.Deref(s.Spec.Replicas, 1), s.Status.ReadyReplicas
		logs := fmt.Sprintf("kubectl -n %s describe pods, and their logs, say why; /readyz names rights that are missing.", s.Namespace)
		switch {
		case wanted == 0:
			c.find(Error, s.String(), "Scale it to 2.", "It has 0 replicas: nobody schedules its pods")
		case ready == 0:
			c.find(Error, s.String(), logs, "None of its %d replicas is ready: nobody schedules its pods", wanted)
		case ready < wanted:
			c.find(Warning, s.String(), logs, "%d of its %d replicas are ready", ready, wanted)
		}
		if s.config != nil && s.config.LeaderElection.LeaderElect && ready > 0 {
			c.lease(s)
		}
	}
	other := slices.ContainsFunc(c.in.Leases, func(l *coordinationapi.Lease) bool { return strings.Contains(l.Name, "stowage") })
	if !found && !other { // one that runs outside the cluster holds a lease
		c.find(Error, "cluster", "kubectl apply -k manifests/overlays/second-scheduler",
			"There is no Deployment of Stowage's scheduler, and no lease of one that runs elsewhere")
	}
}

// lease looks whether somebody leads.
func (c *cluster) lease(s *scheduler) {
	election := s.config.LeaderElection
	name := election.ResourceNamespace + "/" + election.ResourceName
	i := slices.IndexFunc(c.in.Leases, func(l *coordinationapi.Lease) bool {
		return l.Namespace == election.ResourceNamespace && l.Name == election.ResourceName
	})
	do := "Read the logs of the scheduler's pods: they say why none of them takes the lease."
	if i < 0 {
		c.find(Error, "lease "+name, do, "It is not there: no replica of %s leads", s)
		return
	}
	lease := c.in.Leases[i]
	host, _, _ := strings.Cut(ptr.Deref(lease.Spec.HolderIdentity, ""), "_")
	inPods := !slices.ContainsFunc(podsOf(c.s, s.Namespace, s.Spec.Selector), func(p *v1.Pod) bool { return p.Spec.HostNetwork })
	if inPods && c.nodes[host] != nil { // as the stock scheduler names itself, a static pod on the network of its node
		c.find(Error, "lease "+name, "Stop the kube-scheduler on that node: move its manifest out of /etc/kubernetes/manifests.",
			"A program on node %s holds it, and no pod of %s: none of these leads", host, s)
	}
	if renewed := lease.Spec.RenewTime; renewed == nil || c.s.Taken.Sub(renewed.Time) > time.Minute+election.LeaseDuration.Duration {
		c.find(Error, "lease "+name, do, "%q holds it and does not renew it: nobody schedules the pods of %s",
			ptr.Deref(lease.Spec.HolderIdentity, ""), s)
	}
}

func (c *cluster) schedulerConfig() {
	for _, s := range c.schedulers {
		if !s.ours {
			continue
		}
		apply := "kubectl apply -k manifests/overlays/second-scheduler, or put it right: scheduler --validate-config=FILE says what is wrong."
		switch {
		case s.file == "":
			c.find(Error, s.String(), "Start it with --config=/etc/stowage/second-scheduler.yaml.",
				"It has no --config: it is a plain kube-scheduler")
			continue
		case s.problem != "":
			c.find(Error, s.String(), apply, "Its configuration %s is not valid: %s", s.file, s.problem)
			continue
		case s.config == nil:
			c.find(Error, s.String(), apply, "No ConfigMap that it mounts has its configuration %s", s.file)
			continue
		case !s.hasClaims():
			c.find(Error, s.String(), apply, "No profile of %s enables %s", s.file, deviceclaims.Name)
		}
		for i := range s.config.Profiles {
			p := &s.config.Profiles[i]
			if enables(p, deviceclaims.Name) && enables(p, inTree) {
				c.find(Error, s.String(), "Disable "+inTree+" in multiPoint of each profile.",
					"Profile %s enables %s beside %s: both give out devices", p.SchedulerName, inTree, deviceclaims.Name)
			}
		}
	}
}

func (c *cluster) fence() {
	all := c.running()
	for i, s := range all {
		unfenced := s.unfenced()
		if len(unfenced) == 0 {
			continue
		}
		do := "Set fence.enabled: true in the arguments of DeviceClaims in each scheduler, and restart it."
		if n := ptr.Deref(s.Spec.Replicas, 1); n > 1 && !s.config.LeaderElection.LeaderElect {
			c.find(Error, s.String(), do, "Its %d replicas schedule at the same time, and profile %s has no fence: one device is given to two pods",
				n, strings.Join(unfenced, ", "))
		}
		for k, other := range all {
			if k != i && apart(s, other) {
				c.find(Error, s.String(), do, "Profile %s has no fence, and %s gives out the same devices: one is given to two pods",
					strings.Join(unfenced, ", "), other)
			}
		}
	}
}

func (c *cluster) twoForOneName() {
	served := map[string]*scheduler{}
	for _, s := range c.schedulers {
		if s.config == nil || ptr.Deref(s.Spec.Replicas, 1) == 0 {
			continue
		}
		for i := range s.config.Profiles {
			name := s.config.Profiles[i].SchedulerName
			other := served[name]
			if other != nil && other != s && apart(s, other) {
				c.find(Error, s.String(), "Rename the profile in one of them, or let both use one lease.",
					"It serves the scheduler name %s, and so does %s: both place its pods, and one of them fails", name, other)
			}
			served[name] = s
		}
		c.stockBeside(s)
	}
}

// stockBeside looks whether the cluster's kube-scheduler, which is no Deployment as a rule, leads beside one that serves its pods.
func (c *cluster) stockBeside(s *scheduler) {
	stock := &scheduler{config: &schedulerconfig.KubeSchedulerConfiguration{}}
	stock.config.LeaderElection.LeaderElect = true
	stock.config.LeaderElection.ResourceNamespace, stock.config.LeaderElection.ResourceName = "kube-system", "kube-scheduler"
	serves := slices.ContainsFunc(s.config.Profiles,
		func(p schedulerconfig.KubeSchedulerProfile) bool { return p.SchedulerName == v1.DefaultSchedulerName })
	if !serves || !apart(s, stock) ||
		slices.ContainsFunc(c.schedulers, func(o *scheduler) bool { return o != s && o.config != nil && !apart(o, stock) }) {
		return
	}
	for _, lease := range c.in.Leases {
		renewed := lease.Spec.RenewTime
		if lease.Namespace == "kube-system" && lease.Name == "kube-scheduler" && renewed != nil && c.s.Taken.Sub(renewed.Time) < time.Minute {
			c.find(Error, s.String(),
				"Stop the stock scheduler, or rename the profile. overlays/second-profile uses its lease, so that one of them waits.",
				"It serves the scheduler name %s, and so does the stock scheduler, which %q leads: both place its pods, and one of them fails",
				v1.DefaultSchedulerName, ptr.Deref(lease.Spec.HolderIdentity, ""))
		}
	}
}

// otherSchedulers looks for pods of other schedulers that hold devices of the driver whose devices Stowage gives out.
func (c *cluster) otherSchedulers() {
	names := map[string]bool{}
	for _, s := range c.running() {
		for i := range s.config.Profiles {
			if enables(&s.config.Profiles[i], deviceclaims.Name) {
				names[s.config.Profiles[i].SchedulerName] = true
			}
		}
	}
	if len(names) == 0 || slices.ContainsFunc(c.devices, func(d *clusterview.Device) bool {
		return slices.ContainsFunc(d.Taints, func(t clusterview.Taint) bool { return t.Key == ownership.TaintKey })
	}) {
		return
	}
	of := map[string][]string{}
	pods := map[string]*v1.Pod{}
	for _, pod := range c.s.Pods {
		pods[pod.Namespace+"/"+pod.Name] = pod
	}
	for _, d := range c.devices {
		for i := range d.Holders {
			for _, name := range d.Holders[i].Pods {
				pod := pods[d.Holders[i].Namespace+"/"+name]
				if d.Driver == driver && pod != nil && !d.Holders[i].Admin && !names[pod.Spec.SchedulerName] {
					of[pod.Spec.SchedulerName] = append(of[pod.Spec.SchedulerName], pod.Namespace+"/"+pod.Name)
				}
			}
		}
	}
	for _, name := range sortedKeys(of) {
		c.find(Warning, "scheduler "+name, "Set ownership.enabled: true in the arguments of DeviceClaims (docs/ownership.md), or give the pods "+
			"Stowage's scheduler name.",
			"It gives devices of %s to pods, and has no fence: %s. It can give one to a pod that Stowage gives to another",
			driver, some(of[name]))
	}
}

// keptBack tells whether a scheduler may keep a pod out of its queue, and write no condition: one of its claims is not there, or
// it is of a group whose other pods are not.
func keptBack(s *snapshot.Snapshot, pod *v1.Pod) bool {
	if pod.Spec.SchedulingGroup != nil {
		return true
	}
	return slices.ContainsFunc(pod.Spec.ResourceClaims, func(r v1.PodResourceClaim) bool {
		name, _, err := resourceclaim.Name(pod, &r)
		return err != nil || name != nil && !slices.ContainsFunc(s.ResourceClaims, func(claim *resourceapi.ResourceClaim) bool {
			return claim.Namespace == pod.Namespace && claim.Name == *name
		})
	})
}

// Unserved tells whether a pod waits longer than that for a scheduler that has not written a condition to it. One that tries a pod does so
// at once, whether it fits or not.
func Unserved(s *snapshot.Snapshot, pod *v1.Pod, longer time.Duration) bool {
	looked := slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool { return c.Type == v1.PodScheduled })
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && pod.Status.Phase == v1.PodPending && !looked &&
		len(pod.Spec.SchedulingGates) == 0 && s.Taken.Sub(pod.CreationTimestamp.Time) > longer && !keptBack(s, pod)
}

func (c *cluster) unservedPods() {
	of := map[string][]string{}
	for _, pod := range c.s.Pods {
		if Unserved(c.s, pod, patience) {
			of[pod.Spec.SchedulerName] = append(of[pod.Spec.SchedulerName], pod.Namespace+"/"+pod.Name)
		}
	}
	for _, name := range sortedKeys(of) {
		c.find(Error, "scheduler "+name, "Look for a typing error in spec.schedulerName (Stowage's is stowage), or start that scheduler.",
			"It has not looked at pods that wait for it: %s", some(of[name]))
	}
}
