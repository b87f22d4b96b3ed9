// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultbinder"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/noderesources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/queuesort"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
)

// A pod that no node's devices can place is refused in one attempt, with its explanation, and no node is left for
// preemption to try that it could not help on. A node is decided again only if pods of lower priority hold devices there.
func TestAPodThatFiveThousandNodesCannotPlace(t *testing.T) {
	const nodes, mixed, low = 5000, 40, 7 // of the nodes, 40 have a pod of lower priority with too little, and 7 with enough
	var w world
	w.objects = []runtime.Object{class(testClass)}
	hold := func(name, n string, priority int32, devices ...string) {
		w.claims = append(w.claims, claim(name, allocated(n, devices...), reservedFor(name)))
		w.pods = append(w.pods, running(name, n, priority, name))
	}
	for i := range nodes {
		n := fmt.Sprintf("node-%04d", i)
		w.nodes = append(w.nodes, node(n))
		w.objects = append(w.objects, slice(n, device("gpu-0"), device("gpu-1")))
		switch {
		case i < low:
			hold(n+"-both", n, 1, "gpu-0", "gpu-1")
		case i < mixed:
			hold(n+"-first", n, 9, "gpu-0")
			hold(n+"-second", n, 1, "gpu-1")
		default:
			hold(n+"-both", n, 5, "gpu-0", "gpu-1")
		}
	}
	w.claims = append(w.claims, claim("wanted", counted(2)), claim("impossible", counted(3)))
	h := newHarness(t, w)
	// What is found is asked here, not how fast: on a busy machine 5,000 nodes take longer than an attempt may.
	h.plugin.time.FilterTimeout = 0
	h.plugin.time.Shares = searchtime.NewShares(time.Now, time.Hour)

	for _, tc := range []struct {
		claim           string
		again, possible int
		want            string
	}{
		{"wanted", mixed, low, `10000 of 10000 gpu devices held`},
		{"impossible", 0, 0, explain.ReasonNoMatch.OfNodes()},
	} {
		p := pending("p-"+tc.claim, 5, tc.claim)
		before := counterValue(t, contention.NodesDecidedAgain)
		a := h.filterAll(p)
		if again := counterValue(t, contention.NodesDecidedAgain) - before; int(again) != tc.again {
			t.Errorf("%s: %v of %d nodes were decided twice, want %d", tc.claim, again, nodes, tc.again)
		}
		possible := 0
		for _, info := range h.nodes {
			if h.plugin.Filter(h.ctx, a.state, p, info).Code() == fwk.Unschedulable {
				possible++
			}
		}
		if possible != tc.possible {
			t.Errorf("%s: %d nodes are left for preemption, want %d", tc.claim, possible, tc.possible)
		}
		status := a.postFilter()
		if message := status.Message() + a.filter["node-0000"]; !strings.Contains(message, tc.want) {
			t.Errorf("%s: message %q does not contain %q", tc.claim, message, tc.want)
		}
	}
}

// BenchmarkPreemption measures how long preemption takes to find the victims, with pods of higher priority that need one pod to go each, and
// ever more pods of lower priority that may. The reference is the same framework without the plugin: there the node's CPU is what is missing.
func BenchmarkPreemption(b *testing.B) {
	withGroups(b)
	metrics.Register()
	sizes := []int{104, 400, 1600, 8000}
	for _, preemptors := range []int{0, 1, 8} { // 0 is a pod without a group
		for _, victims := range sizes {
			for _, kind := range []string{"reference", "victims without devices", "victims with devices"} {
				name := fmt.Sprintf("group of %d/%d/%s", preemptors, victims, kind)
				if preemptors == 0 {
					name = fmt.Sprintf("pod/%d/%s", victims, kind)
				}
				b.Run(name, func(b *testing.B) {
					s := newPreemptionScale(b, max(preemptors, 1), victims, kind == "victims with devices", kind != "reference")
					preempt := s.preemptForGroup
					if preemptors == 0 {
						preempt = s.preemptForPod
					}
					b.ResetTimer()
					for range b.N {
						preempt()
					}
				})
			}
		}
	}
}

// preemptionScale is a framework with the scheduler's own preemption. Its nodes have CPU for 8 pods and 16 devices, and are full.
type preemptionScale struct {
	testing.TB
	ctx      context.Context
	fwk      framework.Framework
	snapshot *internalcache.Snapshot
	group    podGroup
}

func newPreemptionScale(b *testing.B, preemptors, victims int, withDevices, withPlugin bool) *preemptionScale {
	const onNode, high, low = 8, 10, 1
	w := world{objects: []runtime.Object{class(testClass)}}
	cpu := func(p *v1.Pod) *v1.Pod {
		p.Spec.Containers = []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1")}}}}
		return p
	}
	for i := range victims {
		n, name := fmt.Sprintf("node-%04d", i/onNode), fmt.Sprintf("low-%05d", i)
		if i%onNode == 0 {
			w.nodes = append(w.nodes, node(n, func(n *v1.Node) {
				n.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: *resource.NewQuantity(onNode, resource.DecimalSI), v1.ResourcePods: *resource.NewQuantity(110, resource.DecimalSI)}
			}))
			var devices []resourceapi.Device
			for j := range onNode {
				devices = append(devices, device(fmt.Sprintf("gpu-%d", j)))
				if !withDevices {
					devices = append(devices, device(fmt.Sprintf("more-%d", j)))
				}
			}
			w.objects = append(w.objects, slice(n, devices...))
		}
		if !withDevices {
			w.pods = append(w.pods, cpu(running(name, n, low)))
			continue
		}
		w.claims = append(w.claims, claim(name, allocated(n, fmt.Sprintf("gpu-%d", i%onNode)), reservedFor(name)))
		w.pods = append(w.pods, cpu(running(name, n, low, name)))
	}
	s := &preemptionScale{TB: b, group: podGroup{group: group()}}
	s.group.group.Spec.Priority = ptr.To[int32](high)
	w.groups = []*schedulingapi.PodGroup{s.group.group}
	for i := range preemptors {
		name := fmt.Sprintf("high-%d", i)
		w.claims = append(w.claims, claim(name))
		s.group.pods = append(s.group.pods, cpu(pending(name, high, name)))
	}
	s.start(b, w, append(slices.Clone(w.pods), s.group.pods...), withPlugin)
	return s
}

// start starts the framework.
func (s *preemptionScale) start(b *testing.B, w world, pods []*v1.Pod, withPlugin bool) {
	ctx, cancel := context.WithCancel(klog.NewContext(b.Context(), logr.Discard()))
	s.ctx = ctx
	s.snapshot = internalcache.NewTestSnapshotWithPodGroups(w.pods, w.nodes, w.groups)
	w.pods = pods
	client, _ := newAPI(b, w)
	for _, verb := range []string{"patch", "delete"} {
		client.PrependReactor(verb, "pods", func(clienttesting.Action) (bool, runtime.Object, error) { return true, &v1.Pod{}, nil })
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	var own *Plugin
	features := feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate)
	features.EnableAsyncPreemption = false
	registry := frameworkruntime.Registry{
		queuesort.Name: queuesort.New, defaultbinder.Name: defaultbinder.New,
		Name: func(ctx context.Context, _ runtime.Object, handle fwk.Handle) (plugin fwk.Plugin, err error) {
			own, err = New(ctx, &config.DeviceClaimsArgs{Fence: &config.FenceArgs{Enabled: ptr.To(false)}}, handle, NewShared(unhurried))
			return own, err
		},
		noderesources.Name: func(ctx context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			cpu := []schedulerconfig.ResourceSpec{{Name: string(v1.ResourceCPU), Weight: 1}}
			strategy := &schedulerconfig.ScoringStrategy{Type: schedulerconfig.LeastAllocated, Resources: cpu}
			return noderesources.NewFit(ctx, &schedulerconfig.NodeResourcesFitArgs{ScoringStrategy: strategy}, handle, features)
		},
		defaultpreemption.Name: func(ctx context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			return defaultpreemption.New(ctx, &schedulerconfig.DefaultPreemptionArgs{MinCandidateNodesPercentage: 10, MinCandidateNodesAbsolute: 100}, handle, features)
		},
	}
	names := []string{Name, queuesort.Name, noderesources.Name, defaultpreemption.Name, defaultbinder.Name}
	if !withPlugin {
		names = names[1:]
	}
	profile := &schedulerconfig.KubeSchedulerProfile{SchedulerName: "scheduler", Plugins: &schedulerconfig.Plugins{}}
	for _, name := range names {
		profile.Plugins.MultiPoint.Enabled = append(profile.Plugins.MultiPoint.Enabled, schedulerconfig.Plugin{Name: name, Weight: 1})
	}
	var err error
	s.fwk, err = frameworkruntime.NewFramework(ctx, registry, profile,
		frameworkruntime.WithClientSet(client),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithSnapshotSharedLister(s.snapshot),
		frameworkruntime.WithMutableSnapshotLister(s.snapshot),
		frameworkruntime.WithPodGroupManager(s.snapshot),
		frameworkruntime.WithSharedDRAManager(draManager{}),
		frameworkruntime.WithPodActivator(&activator{}),
		frameworkruntime.WithPodNominator(&nominator{}),
		frameworkruntime.WithEventRecorder(&events.FakeRecorder{}),
		frameworkruntime.WithWaitingPods(frameworkruntime.NewWaitingPodsMap()),
		frameworkruntime.WithPodsInPreBind(frameworkruntime.NewPodsInPreBindMap()),
	)
	if err != nil {
		b.Fatal(err)
	}
	factory.Core().V1().Pods().Informer()
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if own != nil {
		if err := own.shared.account.WaitForSync(ctx); err != nil {
			b.Fatal(err)
		}
	}
	b.Cleanup(func() {
		cancel()
		if own != nil {
			if err := own.Close(); err != nil {
				b.Error(err)
			}
		}
		factory.Shutdown()
		frameworkruntime.WaitForShutdown(s.fwk)
	})
}

// preemptForPod does what the scheduler does with a pod for which it has found no node.
func (s *preemptionScale) preemptForPod() {
	p := s.group.pods[0]
	state, statuses := framework.NewCycleState(), framework.NewDefaultNodeToStatus()
	if _, status, _ := s.fwk.RunPreFilterPlugins(s.ctx, state, p); !status.IsSuccess() {
		s.Fatal(status)
	}
	nodes, err := s.snapshot.NodeInfos().List()
	if err != nil {
		s.Fatal(err)
	}
	for _, node := range nodes {
		status := s.fwk.RunFilterPluginsWithNominatedPods(s.ctx, state, p, node)
		if status.Code() != fwk.Unschedulable {
			s.Fatal(node.Node().Name, status)
		}
		statuses.Set(node.Node().Name, status)
	}
	if result, status := s.fwk.RunPostFilterPlugins(s.ctx, state, p, statuses); !status.IsSuccess() || result.NominatedNodeName == "" {
		s.Fatal(result, status)
	}
}

// preemptForGroup does what the scheduler does with a group for which it has found no nodes.
func (s *preemptionScale) preemptForGroup() {
	state := framework.NewCycleState()
	if _, status := s.schedule(s.ctx, state); status.IsSuccess() {
		s.Fatal("the group fits")
	}
	result, status := s.fwk.RunPodGroupPostFilterPlugins(s.ctx, state, s.group, func(ctx context.Context) (*fwk.PodGroupAssignments, *fwk.Status) {
		return s.schedule(ctx, framework.NewCycleState())
	})
	if !status.IsSuccess() || len(result.NominatingInfos) != len(s.group.pods) || !strings.Contains(status.Message(), fmt.Sprintf("preempting %d victims", len(s.group.pods))) {
		s.Fatalf("%v, %v: %s", result, status.Code(), status.Message())
	}
}

// schedule tries the pods of the group one after the other, each on as many nodes as are enough for the scheduler.
func (s *preemptionScale) schedule(ctx context.Context, group *framework.CycleState) (*fwk.PodGroupAssignments, *fwk.Status) {
	const enough = 100
	nodes, err := s.snapshot.NodeInfos().List()
	if err != nil {
		s.Fatal(err)
	}
	found := &fwk.PodGroupAssignments{}
	for _, p := range s.group.pods {
		state := framework.NewCycleState()
		state.SetPodGroupSchedulingCycle(group)
		if _, status, _ := s.fwk.RunPreFilterPlugins(ctx, state, p); !status.IsSuccess() {
			s.Fatal(status)
		}
		var fits []string
		for _, node := range nodes {
			if s.fwk.RunFilterPluginsWithNominatedPods(ctx, state, p, node).IsSuccess() {
				if fits = append(fits, node.Node().Name); len(fits) == enough {
					break
				}
			}
		}
		if len(fits) == 0 {
			return nil, fwk.NewStatus(fwk.Unschedulable)
		}
		assumed := p.DeepCopy()
		assumed.Spec.NodeName = fits[0]
		if err := s.snapshot.AssumePod(podInfo(assumed).(*framework.PodInfo)); err != nil {
			s.Fatal(err)
		}
		defer func() {
			if err := s.snapshot.ForgetPod(klog.FromContext(ctx), assumed); err != nil {
				s.Fatal(err)
			}
		}()
		if status := s.fwk.RunReservePluginsReserve(ctx, state, p, fits[0]); !status.IsSuccess() {
			s.Fatal(status)
		}
		defer s.fwk.RunReservePluginsUnreserve(ctx, state, p, fits[0])
		found.ProposedAssignments = append(found.ProposedAssignments, &proposal{podInfo(p), fits[0], state})
	}
	return found, nil
}

// proposal is a node for a pod of a group.
type proposal struct {
	fwk.PodInfo
	node  string
	state fwk.CycleState
}

func (p *proposal) GetPodInfo() fwk.PodInfo       { return p.PodInfo }
func (p *proposal) GetNodeName() string           { return p.node }
func (p *proposal) GetCycleState() fwk.CycleState { return p.state }
