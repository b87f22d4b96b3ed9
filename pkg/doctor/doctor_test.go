// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionapi "k8s.io/api/admissionregistration/v1"
	appsapi "k8s.io/api/apps/v1"
	coordinationapi "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	rbacapi "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/doctor"
	"stowage.dev/stowage/pkg/snapshot"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

const manifests = "../../manifests/"

// documents decodes those of a kind from a manifest.
func documents[T any](t *testing.T, file, kind string) (all []*T) {
	t.Helper()
	content, err := os.ReadFile(manifests + file)
	if err != nil {
		t.Fatal(err)
	}
	for document := range bytes.SplitSeq(content, []byte("\n---\n")) {
		var is struct{ Kind string }
		if err := yaml.Unmarshal(document, &is); err != nil {
			t.Fatal(err)
		}
		if is.Kind != kind {
			continue
		}
		object := new(T)
		if err := yaml.UnmarshalStrict(document, object); err != nil {
			t.Fatal(err)
		}
		all = append(all, object)
	}
	return all
}

// planted is a healthy cluster with the shipped manifests, for a fault to be planted in.
type planted struct {
	*snapshottest.Cluster
	in            *snapshot.Installation
	version       string
	missing       []snapshot.Missing
	scheduler     *appsapi.Deployment
	agent         *appsapi.DaemonSet
	configuration *v1.ConfigMap
	lease         *coordinationapi.Lease
}

func healthy(t *testing.T) *planted {
	t.Helper()
	in := &snapshot.Installation{ResourceVersions: []string{"v1"}, FeatureGates: map[string]bool{
		"DynamicResourceAllocation": true, "DRAPartitionableDevices": false, "DRADeviceTaints": true, "DRAExtendedResource": true,
		"DRAResourceClaimDeviceStatus": true, "DRAConsumableCapacity": true,
	}, KubeletGates: map[string]map[string]bool{"worker-0": {"DynamicResourceAllocation": true, "DRAExtendedResource": true}}}
	p := &planted{Cluster: snapshottest.New(2, 2), in: in, version: "v1.37.1"}
	p.scheduler = documents[appsapi.Deployment](t, "base/scheduler/deployment.yaml", "Deployment")[0]
	p.scheduler.Status.ReadyReplicas = 2
	p.agent = documents[appsapi.DaemonSet](t, "base/node-agent/daemonset.yaml", "DaemonSet")[0]
	second, err := os.ReadFile(manifests + "scheduler-config/second-scheduler.yaml")
	if err != nil {
		t.Fatal(err)
	}
	p.configuration = &v1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "stowage-system", Name: "stowage-scheduler-config"},
		Data:       map[string]string{"second-scheduler.yaml": string(second)},
	}
	p.lease = &coordinationapi.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: "stowage-system", Name: "stowage-scheduler"},
		Spec:       coordinationapi.LeaseSpec{HolderIdentity: ptr.To("a"), RenewTime: &metav1.MicroTime{Time: snapshottest.Now.Time}},
	}
	in.Deployments, in.DaemonSets = []*appsapi.Deployment{p.scheduler}, []*appsapi.DaemonSet{p.agent}
	in.ConfigMaps, in.Leases = []*v1.ConfigMap{p.configuration}, []*coordinationapi.Lease{p.lease}
	files, err := filepath.Glob(manifests + "base/access/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		file = strings.TrimPrefix(file, manifests)
		in.ClusterRoles = append(in.ClusterRoles, documents[rbacapi.ClusterRole](t, file, "ClusterRole")...)
		in.ClusterRoleBindings = append(in.ClusterRoleBindings, documents[rbacapi.ClusterRoleBinding](t, file, "ClusterRoleBinding")...)
		in.Roles = append(in.Roles, documents[rbacapi.Role](t, file, "Role")...)
		in.RoleBindings = append(in.RoleBindings, documents[rbacapi.RoleBinding](t, file, "RoleBinding")...)
		in.Policies = append(in.Policies, documents[admissionapi.ValidatingAdmissionPolicy](t, file, "ValidatingAdmissionPolicy")...)
		in.PolicyBindings = append(in.PolicyBindings, documents[admissionapi.ValidatingAdmissionPolicyBinding](t, file, "ValidatingAdmissionPolicyBinding")...)
	}
	p.Namespaces = documents[v1.Namespace](t, "base/namespace/namespace.yaml", "Namespace")
	p.DeviceClasses = documents[resourceapi.DeviceClass](t, "base/deviceclasses/gpu.yaml", "DeviceClass")
	for i, node := range p.Nodes {
		for key, value := range p.agent.Spec.Template.Spec.NodeSelector {
			node.Labels[key] = value
		}
		node.Status.NodeInfo.KubeletVersion = "v1.37.1"
		node.Status.Conditions = []v1.NodeCondition{{Type: "GPUsReady", Status: v1.ConditionTrue, Message: "2 of 2 GPUs can be used"}}
		agent, _ := p.Pod("stowage-node-agent", fmt.Sprintf("agent-%d", i), 0, 0)
		p.ResourceClaims = p.ResourceClaims[:len(p.ResourceClaims)-1]
		agent.Labels, agent.Spec.NodeName, agent.Status.Phase, agent.Spec.ResourceClaims = p.agent.Spec.Template.Labels, node.Name, v1.PodRunning, nil
		agent.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}
	}
	p.Run("team-a", "train", 0, 0, 0)
	waits, _ := p.Pod("team-a", "waits", 8, 0)
	waits.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: v1.PodReasonUnschedulable}}
	return p
}

func (p *planted) snapshot() *snapshot.Snapshot {
	s := p.Snapshot()
	s.Installation, s.ServerVersion, s.Missing = p.in, p.version, p.missing
	return s
}

// secondScheduler adds a scheduler like the shipped one, with another name for its pods and its lease.
func (p *planted) secondScheduler(edit func(string) string) {
	other := p.scheduler.DeepCopy()
	other.Name = "other-scheduler"
	other.Spec.Template.Spec.Volumes[0].ConfigMap.Name = "other"
	content := strings.ReplaceAll(p.configuration.Data["second-scheduler.yaml"], "schedulerName: stowage", "schedulerName: other")
	content = strings.ReplaceAll(content, "resourceName: stowage-scheduler", "resourceName: other")
	p.in.Deployments = append(p.in.Deployments, other)
	p.in.ConfigMaps = append(p.in.ConfigMaps, &v1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "stowage-system", Name: "other"},
		Data:       map[string]string{"second-scheduler.yaml": edit(content)},
	})
	p.in.Leases = append(p.in.Leases, &coordinationapi.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "stowage-system", Name: "other"}, Spec: p.lease.Spec})
	role := p.in.Roles[0].DeepCopy()
	for i := range role.Rules {
		if role.Rules[i].ResourceNames != nil {
			role.Rules[i].ResourceNames = append(role.Rules[i].ResourceNames, "other")
		}
	}
	p.in.Roles[0] = role
}

func (p *planted) edit(old, new string) {
	content := p.configuration.Data["second-scheduler.yaml"]
	if !strings.Contains(content, old) {
		panic("the shipped configuration has no " + old)
	}
	p.configuration.Data["second-scheduler.yaml"] = strings.Replace(content, old, new, 1)
}

func (p *planted) policy(name string) *admissionapi.ValidatingAdmissionPolicy {
	for _, policy := range p.in.Policies {
		if policy.Name == name {
			return policy
		}
	}
	panic("there is no policy " + name)
}

const unfenced = "enabled: true\n        timeout: 30s"

func attribute(d *resourceapi.Device, name, value string) {
	d.Attributes[resourceapi.QualifiedName(name)] = resourceapi.DeviceAttribute{StringValue: &value}
}

// same is a change that changes nothing.
func same(s string) string { return s }

// faults are planted one at a time: each is found, by the check that is for it and by no other.
var faults = map[string]struct {
	plant func(*planted)
	// want is "severity check object: what the problem has", one for each finding.
	want []string
}{
	"an API server without the API": {func(p *planted) { p.version = "v1.33.4" }, []string{"error versions API server: v1.33.4", "error versions nodes worker-0, worker-1: and the API server is"}},
	"an older API server":           {func(p *planted) { p.version = "v1.36.0" }, []string{"warning versions API server: built and tested for 1.37", "error versions nodes worker-0, worker-1: v1.37.1"}},
	"an old kubelet":                {func(p *planted) { p.Nodes[1].Status.NodeInfo.KubeletVersion = "v1.33.1" }, []string{"error versions nodes worker-1: v1.33.1"}},
	"an agent of another version":   {func(p *planted) { p.agent.Spec.Template.Spec.Containers[0].Image += ":v0.9" }, []string{`warning versions deployment stowage-system/stowage-scheduler: has "v0.9"`}},
	"the API is switched off":       {func(p *planted) { p.in.ResourceVersions = []string{"v1beta1"} }, []string{"error apis API server: and not v1"}},
	"no taints on the API server":   {func(p *planted) { p.in.FeatureGates["DRADeviceTaints"] = false }, []string{"warning api-gates API server: DRADeviceTaints is off: ill GPUs"}},
	"partitions without their gate": {func(p *planted) { attribute(&p.ResourceSlices[0].Spec.Devices[0], "profile", "1g.10gb") }, []string{"warning api-gates API server: DRAPartitionableDevices"}},
	"a kubelet without claims":      {func(p *planted) { p.in.KubeletGates["worker-0"]["DynamicResourceAllocation"] = false }, []string{"error kubelet-gates node worker-0: starts pods without their devices"}},
	"budgets may not be listed": {func(p *planted) {
		p.missing = []snapshot.Missing{{Resource: "poddisruptionbudgets.policy", Reason: "forbidden"}}
	}, []string{"warning your-rights you: poddisruptionbudgets.policy"}},
	"slices may not be watched":      {func(p *planted) { p.in.Denied = []string{"watch resourceslices.resource.k8s.io"} }, []string{"warning your-rights you: watch resourceslices"}},
	"no class":                       {func(p *planted) { p.DeviceClasses = nil }, []string{"error classes deviceclass gpu.nvidia.com: 4 devices are for it", "error classes deviceclass gpu.nvidia.com: claims name it: team-a/waits"}},
	"a claim of a class that is not": {func(p *planted) { p.ResourceClaims[1].Spec.Devices.Requests[0].Exactly.DeviceClassName = "gpu" }, []string{"error classes deviceclass gpu: claims name it: team-a/waits"}},
	"two classes of one resource": {func(p *planted) {
		other := p.DeviceClasses[0].DeepCopy()
		other.Name = "other"
		p.DeviceClasses = append(p.DeviceClasses, other)
	}, []string{"warning classes deviceclass other: nvidia.com/gpu"}},
	"a selector that does not compile": {func(p *planted) { p.DeviceClasses[0].Spec.Selectors[0].CEL.Expression = "device.drver == 'x'" }, []string{"error selectors deviceclass gpu.nvidia.com: spec.selectors[0].cel.expression does not compile"}},
	"no scheduler":                     {func(p *planted) { p.in.Deployments, p.in.Leases = nil, nil }, []string{"error scheduler cluster: no Deployment"}},
	"no replica is ready":              {func(p *planted) { p.scheduler.Status.ReadyReplicas = 0 }, []string{"error scheduler deployment stowage-system/stowage-scheduler: None of its 2 replicas"}},
	"one replica is ready":             {func(p *planted) { p.scheduler.Status.ReadyReplicas = 1 }, []string{"warning scheduler deployment stowage-system/stowage-scheduler: 1 of its 2"}},
	"no replicas":                      {func(p *planted) { p.scheduler.Spec.Replicas = ptr.To(int32(0)) }, []string{"error scheduler deployment stowage-system/stowage-scheduler: 0 replicas"}},
	"nobody renews the lease":          {func(p *planted) { p.lease.Spec.RenewTime.Time = snapshottest.Now.Add(-time.Hour) }, []string{"error scheduler lease stowage-system/stowage-scheduler: does not renew it"}},
	"no lease":                         {func(p *planted) { p.in.Leases = nil }, []string{"error scheduler lease stowage-system/stowage-scheduler: not there"}},
	"no configuration":                 {func(p *planted) { p.in.ConfigMaps = nil }, []string{"error scheduler-config deployment stowage-system/stowage-scheduler: No ConfigMap"}},
	"a plain kube-scheduler":           {func(p *planted) { p.scheduler.Spec.Template.Spec.Containers[0].Args = nil }, []string{"error scheduler-config deployment stowage-system/stowage-scheduler: no --config"}},
	"a typing error in it":             {func(p *planted) { p.edit("filterTimeout", "filterTimeuot") }, []string{"error scheduler-config deployment stowage-system/stowage-scheduler: filterTimeuot"}},
	"without DeviceClaims": {func(p *planted) {
		p.configuration.Data["second-scheduler.yaml"] = strings.ReplaceAll(p.configuration.Data["second-scheduler.yaml"], "- name: DeviceClaims\n", "- name: NodeName\n")
	}, []string{"error scheduler-config deployment stowage-system/stowage-scheduler: No profile"}},
	"both plugins": {func(p *planted) { p.edit("enabled:\n", "enabled:\n      - name: DynamicResources\n") }, []string{"error scheduler-config deployment stowage-system/stowage-scheduler: enables DynamicResources beside"}},
	"two schedulers, one without a fence": {func(p *planted) {
		p.secondScheduler(same)
		p.edit(unfenced, "enabled: false")
	}, []string{"error fence deployment stowage-system/stowage-scheduler: Profile stowage has no fence, and deployment stowage-system/other-scheduler"}},
	"two replicas that both lead": {func(p *planted) {
		p.edit("leaderElect: true", "leaderElect: false")
		p.edit(unfenced, "enabled: false")
	}, []string{"error fence deployment stowage-system/stowage-scheduler: Its 2 replicas schedule at the same time"}},
	"two schedulers for one name": {func(p *planted) {
		p.secondScheduler(func(s string) string { return strings.ReplaceAll(s, "schedulerName: other", "schedulerName: stowage") })
	}, []string{"error two-for-one-name deployment stowage-system/other-scheduler: serves the scheduler name stowage"}},
	"the stock scheduler beside one for its name": {func(p *planted) {
		p.edit("- schedulerName: stowage", "- schedulerName: default-scheduler")
		for _, pod := range p.Pods {
			pod.Spec.SchedulerName = "default-scheduler"
		}
		stock := p.lease.DeepCopy()
		stock.Namespace, stock.Name, stock.Spec.HolderIdentity = "kube-system", "kube-scheduler", ptr.To("control-1_8f9b")
		p.in.Leases = append(p.in.Leases, stock)
	}, []string{`error two-for-one-name deployment stowage-system/stowage-scheduler: which "control-1_8f9b" leads`}},
	"another scheduler gives out devices": {func(p *planted) {
		pod, _ := p.Run("team-b", "stock", 0, 1, 0)
		pod.Spec.SchedulerName = "default-scheduler"
	}, []string{"warning other-schedulers scheduler default-scheduler: has no fence: team-b/stock"}},
	"a scheduler that is not there": {func(p *planted) {
		pod, _ := p.Pod("team-b", "lost", 1, 0)
		pod.Spec.SchedulerName = "stowaway"
	}, []string{"error unserved-pods scheduler stowaway: has not looked at pods that wait for it: team-b/lost"}},
	"a role without a right": {func(p *planted) {
		for _, role := range p.in.ClusterRoles {
			if role.Name == "stowage-scheduler" {
				role.Rules = role.Rules[:len(role.Rules)-1]
			}
		}
	}, []string{"error scheduler-rights serviceaccount stowage-system/stowage-scheduler: update resourceclaims.resource.k8s.io/binding"}},
	"an agent without a binding": {func(p *planted) {
		for _, b := range p.in.ClusterRoleBindings {
			if b.Name == "stowage-node-agent" {
				b.Subjects[0].Namespace = "gpu-operator"
			}
		}
	}, []string{"error agent-rights serviceaccount stowage-node-agent/stowage-node-agent: It lacks"}},
	"no right to the lease":       {func(p *planted) { p.in.Roles = nil }, []string{"error lease-rights serviceaccount stowage-system/stowage-scheduler: stowage-system/stowage-scheduler"}},
	"a policy that is missing":    {func(p *planted) { p.policy("stowage-claims-in-use").Name = "stowage-else" }, []string{"error policies validatingadmissionpolicy stowage-claims-in-use: not there"}},
	"a policy of another version": {func(p *planted) { p.policy("stowage-claims-in-use").Spec.Validations[0].Expression = "true" }, []string{"warning policies validatingadmissionpolicy stowage-claims-in-use: not those of this version"}},
	"a policy that is not bound":  {func(p *planted) { p.in.PolicyBindings = p.in.PolicyBindings[1:] }, []string{"error policies validatingadmissionpolicy stowage-bounded-quantities: no effect"}},
	"a policy that only warns":    {func(p *planted) { p.in.PolicyBindings[0].Spec.ValidationActions[0] = admissionapi.Warn }, []string{"error policies validatingadmissionpolicy stowage-bounded-quantities: only warns"}},
	"policies about another account": {func(p *planted) {
		p.scheduler.Spec.Template.Spec.ServiceAccountName = "sched"
		for _, b := range p.in.ClusterRoleBindings {
			b.Subjects = append(b.Subjects, rbacapi.Subject{Kind: "ServiceAccount", Namespace: "stowage-system", Name: "sched"})
		}
		for _, b := range p.in.RoleBindings {
			b.Subjects = append(b.Subjects, rbacapi.Subject{Kind: "ServiceAccount", Namespace: "stowage-system", Name: "sched"})
		}
	}, []string{"error policy-accounts validatingadmissionpolicy stowage-scheduler-own-claims: the account is system:serviceaccount:stowage-system:sched"}},
	"a namespace for restricted pods": {func(p *planted) { p.Namespaces[1].Labels["pod-security.kubernetes.io/enforce"] = "restricted" }, []string{"error namespace namespace stowage-node-agent: is restricted"}},
	"a node without its agent":        {func(p *planted) { p.Pods[0].Spec.NodeName = "" }, []string{"error agent daemonset stowage-node-agent/stowage-node-agent: no pod on nodes: worker-0"}},
	"an agent that is not ready":      {func(p *planted) { p.Pods[1].Status.Conditions[0].Status = v1.ConditionFalse }, []string{"error agent daemonset stowage-node-agent/stowage-node-agent: not ready on nodes: worker-1"}},
	"no node has the label": {func(p *planted) {
		for _, node := range p.Nodes {
			node.Labels = nil
		}
	}, []string{"error agent daemonset stowage-node-agent/stowage-node-agent: No node has the labels"}},
	"a node with GPUs and without the label": {func(p *planted) {
		node := p.Nodes[0].DeepCopy()
		node.Name, node.Labels = "worker-9", map[string]string{"nvidia.com/gpu.present": "true"}
		p.Nodes = append(p.Nodes, node)
	}, []string{"warning gpu-nodes nodes worker-9: they have GPUs"}},
	"the stock scheduler still leads": {func(p *planted) {
		p.secondProfile()
		p.lease.Spec.HolderIdentity = ptr.To("worker-0_8f9b")
	}, []string{"error scheduler lease kube-system/kube-scheduler: A program on node worker-0 holds it"}},
	"policies about one scheduler of two": {func(p *planted) {
		p.secondScheduler(same)
		p.scheduler.Spec.Template.Spec.ServiceAccountName = "sched"
		for _, b := range p.in.ClusterRoleBindings {
			b.Subjects = append(b.Subjects, rbacapi.Subject{Kind: "ServiceAccount", Namespace: "stowage-system", Name: "sched"})
		}
		for _, b := range p.in.RoleBindings {
			b.Subjects = append(b.Subjects, rbacapi.Subject{Kind: "ServiceAccount", Namespace: "stowage-system", Name: "sched"})
		}
	}, []string{"error policy-accounts validatingadmissionpolicy stowage-scheduler-own-claims: the account is system:serviceaccount:stowage-system:sched"}},
	"a node of which another driver has a slice": {func(p *planted) {
		p.interfaces(1)
		p.ResourceSlices = slices.Delete(p.ResourceSlices, 1, 2)
	}, []string{"error registration node worker-1: no ResourceSlice"}},
	"an unlabelled node of which another driver has a slice": {func(p *planted) {
		node := p.Nodes[0].DeepCopy()
		node.Name, node.Labels = "worker-2", map[string]string{"nvidia.com/gpu.present": "true"}
		p.Nodes = append(p.Nodes, node)
		p.interfaces(2)
	}, []string{"warning gpu-nodes nodes worker-2: they have GPUs"}},
	"no slice of a node": {func(p *planted) { p.ResourceSlices = p.ResourceSlices[:1] }, []string{"error registration node worker-1: no ResourceSlice"}},
	"a runtime without CDI": {func(p *planted) {
		p.Nodes[0].Status.Conditions[0].Message = "2 of 2 GPUs can be used; cdi: containerd 1.7.0 has enable_cdi = false"
	}, []string{"warning node-condition node worker-0: enable_cdi = false"}},
	"a node without a driver": {func(p *planted) {
		p.Nodes[0].Status.Conditions[0] = v1.NodeCondition{Type: "GPUsReady", Status: v1.ConditionFalse, Reason: "NoGPUsFound", Message: "no libnvidia-ml.so.1"}
	}, []string{"error node-condition node worker-0: NoGPUsFound: no libnvidia-ml.so.1"}},
	"a GPU and a partition of it": {func(p *planted) {
		spec := &p.ResourceSlices[1].Spec
		counters := func(n string) map[string]resourceapi.Counter {
			return map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(n)}}
		}
		spec.Pool.ResourceSliceCount = 2
		sets := p.ResourceSlices[1].DeepCopy()
		sets.Name, sets.UID, sets.Spec.Devices = "counters", "counters", nil
		sets.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "gpu-0", Counters: counters("80Gi")}}
		p.ResourceSlices = append(p.ResourceSlices, sets)
		for i, size := range []string{"80Gi", "40Gi"} {
			spec.Devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu-0", Counters: counters(size)}}
			p.Run("team-b", fmt.Sprint("job-", i), 0, 1, i)
		}
		p.in.FeatureGates["DRAPartitionableDevices"] = true
	}, []string{"error held-twice device gpu.nvidia.com/worker-1/gpu-0: team-b/job-0 has it, and others have what is not there beside it: team-b/job-1 (gpu-1)"}},
	"a shared device that is lost": {func(p *planted) {
		for _, name := range []string{"one", "two"} {
			_, claim := p.Run("team-b", name, 0, 1, 1)
			claim.Status.Allocation.Devices.Results[0].Device = "gpu-lost"
			claim.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID(name))
		}
	}, []string{"warning lost-devices device gpu.nvidia.com/worker-1/gpu-lost: team-b/one, team-b/two"}},
	"devices called alike on two nodes": {func(p *planted) {
		p.ResourceSlices[0].Spec.Pool.Name, p.ResourceSlices[1].Spec.Pool.Name = "gpus", "gpus"
		p.ResourceClaims[0].Status.Allocation.Devices.Results[0].Pool = "gpus"
	}, []string{"error slices pool gpu.nvidia.com/gpus: Nodes worker-0 and worker-1 both have devices of these names: gpu-0, gpu-1"}},
	"a slice is missing": {func(p *planted) { p.ResourceSlices[0].Spec.Pool.ResourceSliceCount = 2 }, []string{"error slices pool gpu.nvidia.com/worker-0: 1 of 2 slices"}},
	"a counter set that is not there": {func(p *planted) {
		p.ResourceSlices[0].Spec.Devices[1].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "memory"}}
	}, []string{
		"error slices pool gpu.nvidia.com/worker-0: device gpu-1 consumes from counter set memory, which does not exist",
		"warning api-gates API server: DRAPartitionableDevices is off",
	}},
	"a node whose slice of a pool called alike is not whole": {func(p *planted) {
		for _, slice := range p.ResourceSlices {
			slice.Spec.Pool.Name = "gpus"
			for i := range slice.Spec.Devices {
				slice.Spec.Devices[i].Name += "-" + *slice.Spec.NodeName
			}
		}
		p.ResourceSlices[1].Spec.Pool.ResourceSliceCount = 2
		allocated := &p.ResourceClaims[0].Status.Allocation.Devices.Results[0]
		allocated.Pool, allocated.Device = "gpus", "gpu-0-worker-0"
	}, []string{"error slices pool gpu.nvidia.com/gpus: does not count beside the others of its pool"}},
	"a node's slice in the pool of another": {func(p *planted) {
		slice := p.ResourceSlices[1]
		slice.Spec.Pool.Name = "worker-0"
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Name += "-more"
		}
	}, []string{"error slices pool gpu.nvidia.com/worker-0: does not count beside the others of its pool"}},
	"slices of a pool of two nodes that are too few": {func(p *planted) {
		for _, slice := range p.ResourceSlices {
			slice.Spec.Pool.Name, slice.Spec.Pool.ResourceSliceCount = "gpus", 3
			for i := range slice.Spec.Devices {
				slice.Spec.Devices[i].Name += "-" + *slice.Spec.NodeName
			}
		}
		allocated := &p.ResourceClaims[0].Status.Allocation.Devices.Results[0]
		allocated.Pool, allocated.Device = "gpus", "gpu-0-worker-0"
	}, []string{"error slices pool gpu.nvidia.com/gpus: 2 of 3 slices"}},
	"a slice too many":           {func(p *planted) { p.another() }, []string{"error slices pool gpu.nvidia.com/worker-0: 2 of 1 slices"}},
	"two devices of one name":    {func(p *planted) { p.ResourceSlices[0].Spec.Devices[1].Name = "gpu-0" }, []string{"error slices pool gpu.nvidia.com/worker-0: two devices of the name gpu-0"}},
	"slices that do not agree":   {func(p *planted) { p.another().Spec.Pool.ResourceSliceCount = 3 }, []string{"error slices pool gpu.nvidia.com/worker-0: says"}},
	"a slice of yesterday":       {func(p *planted) { p.another().Spec.Pool.Generation = 0 }, []string{"warning slices pool gpu.nvidia.com/worker-0: is of generation 0"}},
	"slices of a node that left": {func(p *planted) { p.Nodes = p.Nodes[:1]; p.Pods = p.Pods[:1] }, []string{"warning slices pool gpu.nvidia.com/worker-1: is not there"}},
	"two drivers of one GPU": {func(p *planted) {
		other := p.another()
		other.Spec.Driver, other.Spec.Pool.Name = "gpu.example.com", "else"
		other.Spec.Devices = append(other.Spec.Devices, p.ResourceSlices[0].Spec.Devices[1])
	}, []string{"error same-device node worker-0: are one GPU"}},
	"a device plugin": {func(p *planted) { p.Nodes[1].Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2") }, []string{"error device-plugin node worker-1: 2 nvidia.com/gpu"}},
	"a device plugin of absurdly many": {
		func(p *planted) {
			p.Nodes[1].Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("18446744073709551615")
		},
		[]string{"error device-plugin node worker-1: 9223372036854775807 nvidia.com/gpu"},
	},
	"a device plugin that the agent has not seen": {func(p *planted) {
		p.Nodes[1].Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2")
		p.listed(1, 0)
	}, []string{"error device-plugin node worker-1: more than the node agent has seen"}},
	"a device plugin that has GPUs": {func(p *planted) {
		p.Nodes[1].Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2")
		p.listed(1, 2)
		p.ResourceSlices[1].Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "gpu.nvidia.com/in-use", Value: "device-plugin", Effect: "NoSchedule"}}
	}, []string{"warning device-plugin node worker-1: claims do not get these GPUs"}},
	"a device for two":   {func(p *planted) { p.Run("team-b", "also", 0, 0, 0) }, []string{"error held-twice device gpu.nvidia.com/worker-0/gpu-0: 2 claims hold it: team-a/train, team-b/also"}},
	"a device that left": {func(p *planted) { p.ResourceSlices[0].Spec.Devices = p.ResourceSlices[0].Spec.Devices[1:] }, []string{"warning lost-devices device gpu.nvidia.com/worker-0/gpu-0: team-a/train"}},
	"an ill GPU":         {func(p *planted) { p.Taint(1, 1, "gpu.nvidia.com/xid") }, []string{"warning taints node worker-1: gpu.nvidia.com/xid:NoSchedule, by their driver, is on devices of it: gpu-1"}},
	"a rule that was forgotten": {func(p *planted) {
		p.DeviceTaintRules = append(p.DeviceTaintRules, &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "night"}, Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: ptr.To("worker-1")}, Taint: resourceapi.DeviceTaint{Key: "maintenance", Effect: "NoExecute"},
		}})
	}, []string{"warning taints node worker-1: by DeviceTaintRule night, is on devices of it: gpu-0, gpu-1"}},
	"a clique without channels": {func(p *planted) {
		for i := range 2 {
			attribute(&p.ResourceSlices[i].Spec.Devices[0], "nvlinkClique", "rack.1")
		}
	}, []string{"warning imex clique rack.1: GPUs of 2 nodes"}},
	"a pod that does not start": {func(p *planted) {
		pod, _ := p.Run("team-b", "stuck", 0, 1, 1)
		pod.Status.Phase = v1.PodPending
	}, []string{"warning not-started pod team-b/stuck: do not start"}},
}

// secondProfile has Stowage in place of the stock scheduler, as manifests/overlays/second-profile has.
func (p *planted) secondProfile() {
	content, err := os.ReadFile(manifests + "scheduler-config/second-profile.yaml")
	if err != nil {
		panic(err)
	}
	p.scheduler.Spec.Template.Spec.Containers[0].Args[0] = "--config=/etc/stowage/second-profile.yaml"
	p.configuration.Data["second-profile.yaml"] = string(content)
	p.lease.Namespace, p.lease.Name = "kube-system", "kube-scheduler"
	role, binding := p.in.Roles[0].DeepCopy(), p.in.RoleBindings[0].DeepCopy()
	role.Namespace, binding.Namespace = "kube-system", "kube-system"
	for i := range role.Rules {
		if role.Rules[i].ResourceNames != nil {
			role.Rules[i].ResourceNames = []string{"kube-scheduler"}
		}
	}
	p.in.Roles, p.in.RoleBindings = append(p.in.Roles, role), append(p.in.RoleBindings, binding)
}

// interfaces has another driver publish the network interfaces of a node.
func (p *planted) interfaces(node int) {
	slice := p.ResourceSlices[0].DeepCopy()
	slice.Name, slice.UID = "nics", "nics"
	slice.Spec.NodeName = ptr.To(fmt.Sprintf("worker-%d", node))
	slice.Spec.Driver, slice.Spec.Pool.Name = "dra.net", *slice.Spec.NodeName
	slice.Spec.Devices = []resourceapi.Device{{Name: "eth1", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"ifName": {StringValue: ptr.To("eth1")}}}}
	p.ResourceSlices = append(p.ResourceSlices, slice)
}

// another adds a second slice, without devices, to the first pool.
func (p *planted) another() *resourceapi.ResourceSlice {
	p.ResourceSlices[0].Spec.Pool.ResourceSliceCount = 1
	slice := p.ResourceSlices[0].DeepCopy()
	slice.Name, slice.Spec.Devices = "another", nil
	p.ResourceSlices = append(p.ResourceSlices, slice)
	return slice
}

// listed has the agent of a node say how many devices of device plugins it has seen.
func (p *planted) listed(node int, n int64) {
	for i := range p.ResourceSlices[node].Spec.Devices {
		p.ResourceSlices[node].Spec.Devices[i].Attributes["devicePluginDevices"] = resourceapi.DeviceAttribute{IntValue: &n}
	}
}

func TestEachPlantedFaultIsFound(t *testing.T) {
	found := map[string]bool{}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			p := healthy(t)
			fault.plant(p)
			report := doctor.Examine(p.snapshot())
			var got []string
			for _, f := range report.Findings {
				found[f.Check] = true
				line := fmt.Sprintf("%s %s %s: %s", f.Severity, f.Check, f.Object, f.Problem)
				for _, want := range fault.want {
					if head, tail, _ := strings.Cut(want, ": "); strings.HasPrefix(line, head+": ") && strings.Contains(line, tail) {
						line = want
					}
				}
				got = append(got, line)
				if f.Do == "" || f.Problem == "" || f.Object == "" {
					t.Errorf("it says too little: %+v", f)
				}
			}
			if diff := cmp.Diff(sorted(fault.want), sorted(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
	for _, check := range doctor.Table() {
		if !found[check.Name] {
			t.Errorf("no fault is planted for the check %s", check.Name)
		}
	}
}

func sorted(s []string) []string {
	s = slices.Compact(slices.Sorted(slices.Values(s)))
	return s
}

// A healthy cluster has no fault, and all checks are done; so it is with two schedulers that have the fence, and with ownership.
func TestAHealthyClusterHasNoFault(t *testing.T) {
	for name, change := range map[string]func(*planted){
		"the shipped manifests": func(*planted) {},
		"two schedulers":        func(p *planted) { p.secondScheduler(same) },
		"ownership": func(p *planted) {
			pod, _ := p.Run("team-b", "stock", 0, 1, 0)
			pod.Spec.SchedulerName = "default-scheduler"
			p.DeviceTaintRules = append(p.DeviceTaintRules, &resourceapi.DeviceTaintRule{
				ObjectMeta: metav1.ObjectMeta{Name: "stowage-owned-by-stowage"},
				Spec: resourceapi.DeviceTaintRuleSpec{
					DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To("gpu.nvidia.com")},
					Taint:          resourceapi.DeviceTaint{Key: "stowage.dev/owned", Effect: resourceapi.DeviceTaintEffectNoSchedule},
				},
			})
		},
		"the agent's own device plugin": func(p *planted) {
			p.Nodes[1].Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2")
			p.listed(1, 2)
		},
		"a second profile": (*planted).secondProfile,
		"--config and its file apart, under another key of the ConfigMap": func(p *planted) {
			p.scheduler.Spec.Template.Spec.Containers[0].Args = []string{"--config", "/etc/stowage/config.yaml"}
			p.scheduler.Spec.Template.Spec.Volumes[0].ConfigMap.Items = []v1.KeyToPath{{Key: "second-scheduler.yaml", Path: "config.yaml"}}
		},
		"IMEX channels beside GPUs of a device plugin": func(p *planted) {
			p.interfaces(1)
			slice := p.ResourceSlices[2]
			slice.Spec.Driver, slice.Spec.Devices[0].Name = "compute-domain.nvidia.com", "channel-0"
			slice.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: ptr.To("channel")}}
			p.Nodes[1].Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2")
			p.listed(1, 2)
		},
		"nodes that a device plugin serves, and with Windows": func(p *planted) {
			for name, os := range map[string]string{"worker-8": "linux", "worker-9": "windows"} {
				node := p.Nodes[0].DeepCopy()
				node.Name, node.Labels = name, map[string]string{"nvidia.com/gpu.present": "true", v1.LabelOSStable: os}
				if os == "linux" {
					node.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("8")
				}
				p.Nodes = append(p.Nodes, node)
			}
		},
		"a node that came just now": func(p *planted) {
			node := p.Nodes[0].DeepCopy()
			node.Name, node.CreationTimestamp = "worker-9", snapshottest.Now
			p.Nodes = append(p.Nodes, node)
		},
		"an agent that selects its nodes by affinity": func(p *planted) {
			node := p.Nodes[0].DeepCopy()
			node.Name, node.Labels = "control", map[string]string{}
			p.Nodes = append(p.Nodes, node)
			var terms []v1.NodeSelectorRequirement
			for key, value := range p.agent.Spec.Template.Spec.NodeSelector {
				terms = append(terms, v1.NodeSelectorRequirement{Key: key, Operator: v1.NodeSelectorOpIn, Values: []string{value}})
			}
			p.agent.Spec.Template.Spec.NodeSelector = nil
			p.agent.Spec.Template.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
				NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: terms}},
			}}}
		},
		"a pod that fetches its model": func(p *planted) {
			pod, _ := p.Run("team-b", "fetches", 0, 1, 1)
			pod.Status.Phase = v1.PodPending
			pod.Status.InitContainerStatuses = []v1.ContainerStatus{{Name: "fetch", State: v1.ContainerState{Running: &v1.ContainerStateRunning{}}}}
		},
		"pods that are kept out of the queue": func(p *planted) {
			p.Pod("team-b", "no-claim", 1, 0)
			p.ResourceClaims = p.ResourceClaims[:len(p.ResourceClaims)-1]
			pod, _ := p.Pod("team-b", "of-a-group", 1, 0)
			pod.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr.To("group")}
		},
		"kubelets without extended resources, which no class has": func(p *planted) {
			p.in.KubeletGates["worker-0"]["DRAExtendedResource"] = false
			for _, class := range p.DeviceClasses {
				class.Spec.ExtendedResourceName = nil
			}
		},
		"devices of the network with equal addresses on their buses": func(p *planted) {
			for _, pool := range []string{"box-0", "box-1"} {
				slice := p.ResourceSlices[0].DeepCopy()
				slice.Name, slice.UID = pool, types.UID(pool)
				slice.Spec.NodeName, slice.Spec.AllNodes, slice.Spec.Driver, slice.Spec.Pool.Name = nil, ptr.To(true), "npu.example.com", pool
				slice.Spec.Devices = slice.Spec.Devices[:1]
				delete(slice.Spec.Devices[0].Attributes, "uuid")
				attribute(&slice.Spec.Devices[0], "resource.kubernetes.io/pciBusID", "0000:01:00.0")
				p.ResourceSlices = append(p.ResourceSlices, slice)
			}
		},
		"a pool that is called alike on two nodes": func(p *planted) {
			for _, slice := range p.ResourceSlices {
				slice.Spec.Pool.Name = "gpus"
				for i := range slice.Spec.Devices {
					slice.Spec.Devices[i].Name += "-" + *slice.Spec.NodeName
				}
			}
			allocated := &p.ResourceClaims[0].Status.Allocation.Devices.Results[0]
			allocated.Pool, allocated.Device = "gpus", "gpu-0-worker-0"
		},
		"a pool of several nodes that is whole with the slices of all": func(p *planted) {
			for _, slice := range p.ResourceSlices {
				slice.Spec.Pool.Name, slice.Spec.Pool.ResourceSliceCount = "gpus", int64(len(p.ResourceSlices))
				for i := range slice.Spec.Devices {
					slice.Spec.Devices[i].Name += "-" + *slice.Spec.NodeName
				}
			}
			allocated := &p.ResourceClaims[0].Status.Allocation.Devices.Results[0]
			allocated.Pool, allocated.Device = "gpus", "gpu-0-worker-0"
		},
		"a pod that came just now": func(p *planted) {
			pod, _ := p.Pod("team-b", "new", 1, 0)
			pod.CreationTimestamp = snapshottest.Now
		},
	} {
		p := healthy(t)
		change(p)
		report := doctor.Examine(p.snapshot())
		if len(report.Findings)+len(report.Skipped) > 0 || len(report.Passed) != len(doctor.Table()) {
			t.Errorf("%s: %+v %+v", name, report.Findings, report.Skipped)
		}
	}
}

// Programs go through the findings, and the checks that passed, where there are none, too.
func TestAReportHasListsEvenIfTheyAreEmpty(t *testing.T) {
	p := healthy(t)
	content, err := json.Marshal(doctor.Examine(p.snapshot()))
	if err != nil || !strings.Contains(string(content), `"findings":[]`) {
		t.Errorf("%s, %v", content, err)
	}
}

// What somebody has edited by hand is no reason to panic.
func TestOddObjects(t *testing.T) {
	p := healthy(t)
	p.scheduler.Spec.Template.Spec.Volumes[0].ConfigMap = nil
	p.agent.Spec.Selector, p.agent.Spec.Template.Spec.Containers = nil, nil
	p.lease.Spec = coordinationapi.LeaseSpec{}
	p.in.Policies[0].Spec = admissionapi.ValidatingAdmissionPolicySpec{}
	p.DeviceClasses[0].Spec = resourceapi.DeviceClassSpec{}
	if report := doctor.Examine(p.snapshot()); len(report.Findings) == 0 {
		t.Error("nothing is found")
	}
}

// What a snapshot does not have is not looked at, and is named: rights that are missing, hashed names, an older version.
func TestWhatIsNotLookedAt(t *testing.T) {
	p := healthy(t)
	p.missing = []snapshot.Missing{{Resource: "configmaps", Reason: "forbidden"}}
	p.in.ConfigMaps = nil
	report := doctor.Examine(p.snapshot())
	var got []string
	for _, skipped := range report.Skipped {
		got = append(got, skipped.Check+" "+skipped.Why)
	}
	if diff := cmp.Diff([]string{
		"scheduler-config configmaps: forbidden", "fence configmaps: forbidden", "two-for-one-name configmaps: forbidden",
		"other-schedulers configmaps: forbidden", "lease-rights configmaps: forbidden",
	}, got); diff != "" || len(report.Findings) > 0 {
		t.Errorf("%s %+v", diff, report.Findings)
	}
	hashed, err := healthy(t).snapshot().Hash()
	if err != nil {
		t.Fatal(err)
	}
	old := healthy(t).snapshot()
	old.Installation = nil
	for want, s := range map[string]*snapshot.Snapshot{"the names of the snapshot are hashed": hashed, "the snapshot is of an older version": old} {
		report := doctor.Examine(s)
		if len(report.Findings) > 0 || len(report.Skipped) < 10 || len(report.Passed) < 10 || !strings.HasPrefix(report.Skipped[0].Why, want) {
			t.Errorf("%s: %+v", want, report)
		}
	}
}

// The manual has a line for each check.
func TestTheManualHasTheTable(t *testing.T) {
	manual, err := os.ReadFile("../../docs/kubectl.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, check := range doctor.Table() {
		if line := fmt.Sprintf("| `%s` | %s |\n", check.Name, check.About); !strings.Contains(string(manual), line) {
			t.Errorf("docs/kubectl.md has no line %s", line)
		}
	}
}
