// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/twopaths"
)

// HostProcesses says what is done about processes of the host on a GPU that no claim has.
type HostProcesses string

// The policies. Both tell it on the Node and by a metric.
const (
	// WarnOfHostProcesses leaves the GPU to claims: the process may be there to look at something.
	WarnOfHostProcesses HostProcesses = "warn"
	// TaintForHostProcesses gives the GPU to no claim until they are gone.
	TaintForHostProcesses HostProcesses = "taint"
)

// reasonInUse is the key of the taint of a GPU that is used without a claim.
const reasonInUse health.Reason = twopaths.TaintName

const (
	foreignInterval = health.LookInterval
	// listedAfter is when the kubelet lists what our own device plugin offers anew.
	listedAfter = 2 * time.Second
	// reasonUsedWithoutClaim is that of the event.
	reasonUsedWithoutClaim = "GPUUsedWithoutClaim"
	// reasonOfDevicePlugin is that of the event.
	reasonOfDevicePlugin = "GPUOfDevicePlugin"
	// maxNamedProcesses is how many of a GPU's processes are named.
	maxNamedProcesses = 3
)

// nvidiaDaemons have GPUs open for the node, not for themselves, by the name of the command as the kernel keeps it (15 bytes).
var nvidiaDaemons = sets.New("nvidia-persiste", "nvidia-cuda-mps", "nv-hostengine", "dcgm-exporter", "nv-fabricmanage", "nvidia-imex",
	"nvidia-smi", "nvidia-powerd")

// foreignProcess is on a GPU that no claim has.
type foreignProcess struct {
	pid uint32
	foreignUser
}

// foreignUser is whose a process is. It stays the same when a program is started anew.
type foreignUser struct {
	name string    // of the command; empty if it has none
	pod  types.UID // empty for a process of the host
}

func (u foreignUser) of() string {
	if u.pod != "" {
		return "of pod " + string(u.pod)
	}
	return "of the host"
}

func (u foreignUser) String() string { return cmp.Or(u.name, "a process") + " " + u.of() }

// foreignUse is what uses a GPU that no claim has, or may be given it at any time. taints tells that the
// processes alone take the GPU out.
type foreignUse struct {
	processes []foreignProcess
	// plugin is the resource by which another device plugin of the node offers the GPU, or has given it away; empty if none does.
	plugin string
	taints bool
}

// takesOut tells whether claims do not get the GPU.
func (u *foreignUse) takesOut() bool { return u.taints || u.plugin != "" }

// message says whose the processes are. It does not change when a program is started anew: it is in an event, and in the Node's condition.
func (u *foreignUse) message() string {
	users := u.users()
	if more := len(users) - maxNamedProcesses; more > 0 {
		users = append(users[:maxNamedProcesses:maxNamedProcesses], fmt.Sprintf("%d more", more))
	}
	var parts []string
	if u.plugin != "" {
		parts = append(parts, "another device plugin of this node offers it as "+u.plugin)
	}
	if len(users) > 0 {
		parts = append(parts, "it is used without a claim by "+strings.Join(users, ", "))
	}
	return strings.Join(parts, ", and ")
}

// String names each process, for the log.
func (u *foreignUse) String() string {
	var names []string
	for _, p := range u.processes {
		names = append(names, fmt.Sprintf("%d (%s)", p.pid, p.foreignUser))
	}
	return strings.Join(names, ", ")
}

// users are those whose processes there are, each once.
func (u *foreignUse) users() []string {
	var users []string
	for _, p := range u.processes {
		users = append(users, p.String())
	}
	slices.Sort(users)
	return slices.Compact(users)
}

func (u *foreignUse) taint() resourceapi.DeviceTaint {
	value := "host-process"
	if u.plugin != "" {
		value = twopaths.TaintValue
	} else if slices.ContainsFunc(u.processes, func(p foreignProcess) bool { return p.pod != "" }) {
		value = "pod"
	}
	return resourceapi.DeviceTaint{Key: TaintKey(reasonInUse), Value: value, Effect: resourceapi.DeviceTaintEffectNoSchedule}
}

// watchForeign looks who uses GPUs that no claim has until ctx ends. The agent that publishes does, and it looks first, when GPUs are
// known: what it publishes first must not take away the taint that an agent before has set.
func (a *Agent) watchForeign(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "foreign"))
	select {
	case <-ctx.Done():
		return
	case <-a.publisher.leads:
	}
	_, offered := a.plugins.Resources()
	a.lookForForeign(ctx)
	close(a.publisher.foreignKnown)
	ticker := time.NewTicker(foreignInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-offered:
			// The scheduler keeps pods from our devices while a claim may have them, until the slices say that we know them.
			_, offered = a.plugins.Resources()
			select {
			case <-ctx.Done():
				return
			case <-time.After(listedAfter):
			}
		}
		a.lookForForeign(ctx)
	}
}

// lookForForeign tells of what is new. Of a GPU of which it cannot be found out what was known stays, and it is counted.
func (a *Agent) lookForForeign(ctx context.Context) {
	h := a.opts.Hardware
	before := h.withheld.foreignUses()
	now, blind := map[string]foreignUse{}, 0
	plugins, listed, pluginsErr := a.plugins.OfOthers(ctx)
	if ctx.Err() != nil || h.opts.Keeper.Why() != nil { // then nobody can be asked, and no claim gets a GPU
		return
	}
	if a.blind.changed("device plugins", pluginsErr) {
		utilruntime.HandleErrorWithContext(ctx, pluginsErr, "Device plugins of the node may offer its GPUs")
	}
	for gpu := range h.inventory.devices() {
		use, err := a.foreignOn(ctx, gpu)
		if use.plugin = plugins[gpu]; pluginsErr != nil {
			use.plugin = before[gpu].plugin
		}
		if ctx.Err() != nil {
			return
		}
		if a.blind.changed(gpu, err) {
			utilruntime.HandleErrorWithContext(ctx, err, "It is not known who uses the GPU", "device", gpu)
		}
		if err != nil {
			blind++
			was := before[gpu]
			use.processes, use.taints = was.processes, was.taints
		}
		if len(use.processes) > 0 || use.plugin != "" {
			now[gpu] = use
		}
		h.monitor.Left(ctx, gpu, memoryLeft(ctx, a, gpu, &use, err))
	}
	gpusOfUnknownUse.Set(float64(blind))
	foreignProcesses.Reset()
	gpusOfDevicePlugins.Reset()
	for _, gpu := range slices.Sorted(maps.Keys(now)) {
		use := now[gpu]
		if use.plugin != "" {
			gpusOfDevicePlugins.WithLabelValues(gpu, use.plugin).Set(1)
		}
		for _, p := range use.processes {
			of := "host"
			if p.pod != "" {
				of = "pod"
			}
			foreignProcesses.WithLabelValues(gpu, of).Inc()
		}
		// Not at each new PID: a program that is started again and again would use up the events that a Node may have.
		was := before[gpu]
		if !slices.Equal(was.processes, use.processes) {
			klog.FromContext(ctx).Info("A GPU is used without a claim", "device", gpu, "processes", use.String())
		}
		if use.plugin != "" && was.plugin != use.plugin {
			a.reporter.nodeEventf(corev1.EventTypeWarning, reasonOfDevicePlugin,
				"Device %s: another device plugin of this node offers it as %s, so claims do not get it: a GPU has one path", gpu, use.plugin)
		}
		if !sets.New(was.users()...).HasAll(use.users()...) {
			a.reporter.nodeEventf(corev1.EventTypeWarning, reasonUsedWithoutClaim, "Device %s: %s", gpu, use.message())
		}
	}
	if pluginsErr != nil {
		listed = h.withheld.listedByPlugins()
	}
	if h.withheld.setForeign(now, listed) {
		a.publisher.refresh()
	}
}

// foreignOn returns the processes on a GPU that no claim has. Processes of NVIDIA's daemons and of pods with admin access are none.
func (a *Agent) foreignOn(ctx context.Context, gpu string) (use foreignUse, err error) {
	// First the processes: those of a claim that is released meanwhile would be taken for others'.
	users, err := a.opts.Hardware.users.of(ctx, gpu)
	if errors.Is(err, nvml.ErrGPULost) {
		return use, nil // no claim gets it, whoever has it open
	}
	if err != nil || len(users.processes) == 0 {
		return use, err
	}
	records, err := a.reporter.ledger.Records()
	if err != nil {
		return use, err
	}
	admins := sets.New[types.UID]()
	for _, record := range records {
		if record.Holds(gpu) {
			return use, nil
		}
		if record.Entry != nil && slices.ContainsFunc(record.Entry.Devices, func(d ledger.Device) bool { return d.AdminAccess && d.GPU == gpu }) {
			admins.Insert(record.Entry.Pods...)
		}
	}
	quarantined, err := a.claims.Quarantined() // after the ledger, from which it comes
	if err != nil {
		return use, err
	}
	quarantined = slices.DeleteFunc(quarantined, func(q prepare.Quarantine) bool { return q.GPU != gpu })
	for _, process := range users.processes {
		// What is left in a partition in quarantine keeps nobody off the others.
		place := users.placeOf(&process)
		if place != nil && slices.ContainsFunc(quarantined, func(q prepare.Quarantine) bool {
			return slices.ContainsFunc(q.Places(), place.Overlaps)
		}) {
			continue
		}
		p := foreignProcess{pid: process.PID}
		if p.pod, err = a.opts.Tools.Processes.PodOf(process.PID); err == nil {
			p.name, err = a.opts.Tools.Processes.NameOf(process.PID)
		}
		if errors.Is(err, sharing.ErrNoProcess) {
			continue
		}
		if err != nil {
			return use, fmt.Errorf("GPU %s: %w", gpu, err)
		}
		if int(p.pid) == os.Getpid() || nvidiaDaemons.Has(p.name) || p.pod != "" && admins.Has(p.pod) {
			continue
		}
		use.processes = append(use.processes, p)
		// Prepare refuses a GPU with a process of a pod without a claim, whatever the policy.
		use.taints = use.taints || p.pod != "" || a.opts.HostProcesses == TaintForHostProcesses
	}
	return use, nil
}
