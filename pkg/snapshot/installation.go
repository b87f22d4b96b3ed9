// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	admissionapi "k8s.io/api/admissionregistration/v1"
	appsapi "k8s.io/api/apps/v1"
	authorizationapi "k8s.io/api/authorization/v1"
	coordinationapi "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	rbacapi "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
	"sigs.k8s.io/yaml"
)

// Installation is what says how schedulers and node agents are set up, for doctor. It has their images and configurations, arguments of
// Stowage and kube-scheduler, and nothing of other workloads than schedulers, DRA drivers and device plugins.
type Installation struct {
	// ResourceVersions are the versions of resource.k8s.io that the API server serves.
	ResourceVersions []string `json:"resourceVersions,omitempty"`
	// FeatureGates are those of the API server; none if they could not be read.
	FeatureGates map[string]bool `json:"featureGates,omitempty"`
	// KubeletGates are those of kubelets, by node: of one node with devices for each version of the kubelet.
	KubeletGates map[string]map[string]bool `json:"kubeletGates,omitempty"`
	// Denied are rights that kubectl stowage uses besides those of Missing, and that the user lacks: "watch pods".
	Denied []string `json:"denied,omitempty"`
	// Deployments are those of schedulers, DaemonSets those of node agents, DRA drivers and device plugins.
	Deployments []*appsapi.Deployment `json:"deployments,omitempty"`
	DaemonSets  []*appsapi.DaemonSet  `json:"daemonSets,omitempty"`
	// ConfigMaps are those of the Deployments, with scheduler configurations alone.
	ConfigMaps []*v1.ConfigMap `json:"configMaps,omitempty"`
	// Leases are those of schedulers.
	Leases []*coordinationapi.Lease `json:"leases,omitempty"`
	// Roles and bindings are those of the workloads' accounts.
	ClusterRoles        []*rbacapi.ClusterRole        `json:"clusterRoles,omitempty"`
	ClusterRoleBindings []*rbacapi.ClusterRoleBinding `json:"clusterRoleBindings,omitempty"`
	Roles               []*rbacapi.Role               `json:"roles,omitempty"`
	RoleBindings        []*rbacapi.RoleBinding        `json:"roleBindings,omitempty"`
	// Policies are Stowage's admission policies, and PolicyBindings the bindings of these.
	Policies       []*admissionapi.ValidatingAdmissionPolicy        `json:"policies,omitempty"`
	PolicyBindings []*admissionapi.ValidatingAdmissionPolicyBinding `json:"policyBindings,omitempty"`
}

// check refuses lists with a null.
func (in *Installation) check() error {
	if in == nil {
		return nil
	}
	return errors.Join(
		noNull("deployments", in.Deployments), noNull("daemonSets", in.DaemonSets), noNull("configMaps", in.ConfigMaps),
		noNull("leases", in.Leases),
		noNull("clusterRoles", in.ClusterRoles), noNull("clusterRoleBindings", in.ClusterRoleBindings), noNull("roles", in.Roles),
		noNull("roleBindings", in.RoleBindings), noNull("policies", in.Policies), noNull("policyBindings", in.PolicyBindings),
	)
}

func noNull[T any](field string, list []*T) error {
	if i := slices.Index(list, nil); i >= 0 {
		return fmt.Errorf("%s[%d]: is null", field, i)
	}
	return nil
}

// TakeInstallation reads what doctor needs besides the objects, into the snapshot. What the user may not read is noted in Missing.
func TakeInstallation(ctx context.Context, client kubernetes.Interface, s *Snapshot) error {
	in := &Installation{}
	s.Installation = in
	groups, err := client.Discovery().ServerGroups()
	if err != nil {
		return fmt.Errorf("ask the API server which APIs it serves: %w", err)
	}
	for _, group := range groups.Groups {
		if group.Name == resourceapi.GroupName {
			for _, version := range group.Versions {
				in.ResourceVersions = append(in.ResourceVersions, version.Version)
			}
		}
	}
	if err := errors.Join(
		s.reading("deployments.apps", listKept(ctx, &in.Deployments, keepDeployment, client.AppsV1().Deployments(all).List)),
		s.reading("daemonsets.apps", listKept(ctx, &in.DaemonSets, keepDaemonSet, client.AppsV1().DaemonSets(all).List)),
	); err != nil {
		return err
	}
	if err := errors.Join(
		s.takeConfigMaps(ctx, client),
		s.takeLeases(ctx, client),
		s.reading("clusterrolebindings.rbac.authorization.k8s.io", listKept(ctx, &in.ClusterRoleBindings,
			func(b *rbacapi.ClusterRoleBinding) bool { return in.isOurs(b.Subjects) }, client.RbacV1().ClusterRoleBindings().List)),
		s.reading("rolebindings.rbac.authorization.k8s.io", listKept(ctx, &in.RoleBindings,
			func(b *rbacapi.RoleBinding) bool { return in.isOurs(b.Subjects) }, client.RbacV1().RoleBindings(all).List)),
		s.reading("validatingadmissionpolicies.admissionregistration.k8s.io", listKept(ctx, &in.Policies,
			func(p *admissionapi.ValidatingAdmissionPolicy) bool { return strings.HasPrefix(p.Name, ownPrefix) },
			client.AdmissionregistrationV1().ValidatingAdmissionPolicies().List)),
		s.reading("validatingadmissionpolicybindings.admissionregistration.k8s.io", listKept(ctx, &in.PolicyBindings,
			func(b *admissionapi.ValidatingAdmissionPolicyBinding) bool {
				return strings.HasPrefix(b.Spec.PolicyName, ownPrefix)
			},
			client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().List)),
	); err != nil {
		return err
	}
	if err := errors.Join(
		s.reading("clusterroles.rbac.authorization.k8s.io",
			listKept(ctx, &in.ClusterRoles, in.refersToClusterRole, client.RbacV1().ClusterRoles().List)),
		s.reading("roles.rbac.authorization.k8s.io", listKept(ctx, &in.Roles, in.refersToRole, client.RbacV1().Roles(all).List)),
		s.takeDenied(ctx, client),
	); err != nil {
		return err
	}
	s.takeGates(ctx, client)
	return ctx.Err()
}

// Reasons of Missing.
const (
	forbidden = "forbidden"
	notServed = "not served"
)

// ownPrefix begins the names of Stowage's objects that are in no namespace.
const ownPrefix = "stowage-"

// reading notes what may not be read, or is not served, and passes on other errors.
func (s *Snapshot) reading(resource string, err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		s.Missing = append(s.Missing, Missing{Resource: resource, Reason: forbidden})
		return nil
	case apierrors.IsNotFound(err):
		s.Missing = append(s.Missing, Missing{Resource: resource, Reason: notServed})
		return nil
	}
	return fmt.Errorf("list %s: %w", resource, err)
}

// listKept appends the objects of a list that keep wants. It may trim them.
func listKept[T any, P object[T], L apiruntime.Object](
	ctx context.Context, into *[]P, keep func(P) bool, list func(context.Context, metav1.ListOptions) (L, error),
) error {
	p := pager.New(func(ctx context.Context, opts metav1.ListOptions) (apiruntime.Object, error) { return list(ctx, opts) })
	err := p.EachListItem(ctx, metav1.ListOptions{}, func(item apiruntime.Object) error {
		if object := item.(P); keep(object) {
			object.SetManagedFields(nil)
			object.SetAnnotations(nil)
			*into = append(*into, object)
		}
		return nil
	})
	sortByName(*into)
	return err
}

// keepDeployment keeps schedulers of pods, and not others of that name: Stowage's, kube-scheduler,
// and what has a configuration like theirs.
func keepDeployment(d *appsapi.Deployment) bool {
	configured := slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c v1.Container) bool { return SchedulerConfigFile(&c) != "" })
	if !mentions(&d.ObjectMeta, &d.Spec.Template, "scheduler") || !configured && !isKnown(d) {
		return false
	}
	trimTemplateSpec(&d.Spec.Template, isKnown(d))
	return true
}

// isKnown tells whether a Deployment runs Stowage or kube-scheduler, by its name or an image's.
func isKnown(d *appsapi.Deployment) bool {
	return mentions(&d.ObjectMeta, &d.Spec.Template, "stowage", "kube-scheduler")
}

// SchedulerConfigFile is the value of a container's argument --config; it is empty without one.
func SchedulerConfigFile(c *v1.Container) string {
	arguments := slices.Concat(c.Command, c.Args)
	for i, argument := range arguments {
		name, value, given := strings.Cut(argument, "=")
		switch {
		case name != "--config" && name != "-config":
		case given:
			return value
		case i+1 < len(arguments):
			return arguments[i+1]
		}
	}
	return ""
}

func keepDaemonSet(d *appsapi.DaemonSet) bool {
	if !mentions(&d.ObjectMeta, &d.Spec.Template, "stowage", "nvidia", "dra-driver", "device-plugin") {
		return false
	}
	trimTemplateSpec(&d.Spec.Template, mentions(&d.ObjectMeta, &d.Spec.Template, "stowage"))
	return true
}

// mentions tells whether a workload has one of the words in its name, or in the name of an image.
func mentions(meta *metav1.ObjectMeta, template *v1.PodTemplateSpec, words ...string) bool {
	return slices.ContainsFunc(words, func(word string) bool {
		return strings.Contains(meta.Name, word) || slices.ContainsFunc(template.Spec.Containers, func(c v1.Container) bool {
			return strings.Contains(c.Image, word)
		})
	})
}

// trimTemplateSpec leaves what says which program runs where, and as whom. Arguments stay of known programs, and of others,
// which may be told secrets, --config alone.
func trimTemplateSpec(template *v1.PodTemplateSpec, known bool) {
	template.Annotations = nil
	spec := &template.Spec
	kept := v1.PodSpec{ServiceAccountName: spec.ServiceAccountName, NodeSelector: spec.NodeSelector, Tolerations: spec.Tolerations}
	if spec.Affinity != nil && spec.Affinity.NodeAffinity != nil {
		kept.Affinity = &v1.Affinity{NodeAffinity: spec.Affinity.NodeAffinity}
	}
	for i := range spec.Containers {
		c := &spec.Containers[i]
		left := v1.Container{Name: c.Name, Image: c.Image}
		if file := SchedulerConfigFile(c); known {
			left.Command, left.Args = c.Command, c.Args
		} else if file != "" {
			left.Args = []string{"--config=" + file}
		}
		kept.Containers = append(kept.Containers, left)
	}
	for _, volume := range spec.Volumes {
		if volume.ConfigMap != nil {
			kept.Volumes = append(kept.Volumes, v1.Volume{Name: volume.Name, VolumeSource: v1.VolumeSource{ConfigMap: volume.ConfigMap}})
		}
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if m := source.ConfigMap; m != nil {
				kept.Volumes = append(kept.Volumes, v1.Volume{Name: volume.Name, VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{
					LocalObjectReference: m.LocalObjectReference, Items: m.Items,
				}}})
			}
		}
	}
	template.Spec = kept
}

// keyData is the private key of an extender's client, in YAML or JSON.
var keyData = regexp.MustCompile(`("?\bkeyData"?\s*:\s*)("[^"]*"|'[^']*'|[^\s,}]+)`)

// takeConfigMaps gets those that Deployments mount; one that is not there is left out.
func (s *Snapshot) takeConfigMaps(ctx context.Context, client kubernetes.Interface) error {
	in := s.Installation
	var refused error
	for _, d := range in.Deployments {
		for _, volume := range d.Spec.Template.Spec.Volumes {
			if slices.ContainsFunc(in.ConfigMaps,
				func(c *v1.ConfigMap) bool { return c.Namespace == d.Namespace && c.Name == volume.ConfigMap.Name }) {
				continue
			}
			config, err := client.CoreV1().ConfigMaps(d.Namespace).Get(ctx, volume.ConfigMap.Name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				continue
			case apierrors.IsForbidden(err):
				if isKnown(d) {
					refused = err
				}
				continue
			case err != nil:
				return s.reading("configmaps", err)
			}
			config.SetManagedFields(nil)
			config.SetAnnotations(nil)
			config.BinaryData = nil
			for key, value := range config.Data {
				if !strings.Contains(value, "KubeSchedulerConfiguration") {
					delete(config.Data, key)
					continue
				}
				config.Data[key] = keyData.ReplaceAllString(value, `${1}""`)
			}
			in.ConfigMaps = append(in.ConfigMaps, config)
		}
	}
	sortByName(in.ConfigMaps)
	return s.reading("configmaps", refused)
}

// shippedNamespace has the lease of manifests/scheduler-config/second-scheduler.yaml.
const shippedNamespace = "stowage-system"

// takeLeases lists those of schedulers, where these run, where kube-scheduler and Stowage's configuration have theirs, as one outside the
// cluster has, and where configurations say: not all, of which each node has one.
func (s *Snapshot) takeLeases(ctx context.Context, client kubernetes.Interface) error {
	in := s.Installation
	namespaces, names := []string{metav1.NamespaceSystem, shippedNamespace}, []string{}
	for _, d := range in.Deployments {
		namespaces = append(namespaces, d.Namespace)
	}
	for _, m := range in.ConfigMaps {
		for _, content := range m.Data {
			var c struct {
				LeaderElection struct{ ResourceNamespace, ResourceName string }
			}
			if yaml.Unmarshal([]byte(content), &c) == nil && c.LeaderElection.ResourceName != "" {
				namespaces = append(namespaces, cmp.Or(c.LeaderElection.ResourceNamespace, metav1.NamespaceSystem))
				names = append(names, c.LeaderElection.ResourceName)
			}
		}
	}
	for _, namespace := range slices.Compact(slices.Sorted(slices.Values(namespaces))) {
		err := listKept(ctx, &in.Leases, func(l *coordinationapi.Lease) bool {
			return strings.Contains(l.Name, "scheduler") || slices.Contains(names, l.Name)
		}, client.CoordinationV1().Leases(namespace).List)
		if err != nil {
			return s.reading("leases.coordination.k8s.io", err)
		}
	}
	return nil
}

// isOurs tells whether a subject is the account of a workload, or a group that it is in.
func (in *Installation) isOurs(subjects []rbacapi.Subject) bool {
	for _, d := range in.Deployments {
		if slices.ContainsFunc(subjects, func(s rbacapi.Subject) bool {
			return IsAccount(s, d.Namespace, d.Spec.Template.Spec.ServiceAccountName)
		}) {
			return true
		}
	}
	for _, d := range in.DaemonSets {
		if slices.ContainsFunc(subjects, func(s rbacapi.Subject) bool {
			return IsAccount(s, d.Namespace, d.Spec.Template.Spec.ServiceAccountName)
		}) {
			return true
		}
	}
	return false
}

// IsAccount tells whether a subject of RBAC is a ServiceAccount, or a group that the API server puts it in. Without a name it is "default".
func IsAccount(subject rbacapi.Subject, namespace, name string) bool {
	if name == "" {
		name = "default"
	}
	switch subject.Kind {
	case rbacapi.ServiceAccountKind:
		return subject.Namespace == namespace && subject.Name == name
	case rbacapi.UserKind:
		return subject.Name == "system:serviceaccount:"+namespace+":"+name
	case rbacapi.GroupKind:
		return subject.Name == "system:serviceaccounts" || subject.Name == "system:serviceaccounts:"+namespace
	}
	return false
}

func (in *Installation) refersToClusterRole(role *rbacapi.ClusterRole) bool {
	is := func(ref rbacapi.RoleRef) bool { return ref.Kind == "ClusterRole" && ref.Name == role.Name }
	return slices.ContainsFunc(in.ClusterRoleBindings, func(b *rbacapi.ClusterRoleBinding) bool { return is(b.RoleRef) }) ||
		slices.ContainsFunc(in.RoleBindings, func(b *rbacapi.RoleBinding) bool { return is(b.RoleRef) })
}

func (in *Installation) refersToRole(role *rbacapi.Role) bool {
	return slices.ContainsFunc(in.RoleBindings, func(b *rbacapi.RoleBinding) bool {
		return b.RoleRef.Kind == "Role" && b.RoleRef.Name == role.Name && b.Namespace == role.Namespace
	})
}

// takeDenied asks for the rights that a list does not need and --watch does.
func (s *Snapshot) takeDenied(ctx context.Context, client kubernetes.Interface) error {
	for _, resource := range []string{"resourceslices", "resourceclaims", "devicetaintrules"} {
		review := &authorizationapi.SelfSubjectAccessReview{Spec: authorizationapi.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationapi.ResourceAttributes{Verb: "watch", Group: resourceapi.GroupName, Resource: resource},
		}}
		review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return s.reading("selfsubjectaccessreviews.authorization.k8s.io", err)
		}
		if !review.Status.Allowed {
			s.Installation.Denied = append(s.Installation.Denied, "watch "+resource+"."+resourceapi.GroupName)
		}
	}
	return nil
}

const (
	// gateTimeout is for the metrics of one server.
	gateTimeout = 10 * time.Second
	// maxKubelets bounds how many kubelets are asked.
	maxKubelets = 8
)

// takeGates reads the feature gates of the API server and of kubelets from their metrics (KEP-3352: kubernetes_feature_enabled). A server
// that does not answer is noted, and is no error: nodes may be away.
func (s *Snapshot) takeGates(ctx context.Context, client kubernetes.Interface) {
	rest := client.Discovery().RESTClient()
	if rest == nil {
		return
	}
	read := func(path string) (map[string]bool, error) {
		ctx, cancel := context.WithTimeout(ctx, gateTimeout)
		defer cancel()
		body, err := rest.Get().AbsPath(path).SetHeader("Accept", "text/plain").Stream(ctx)
		if err != nil {
			return nil, err
		}
		defer body.Close()
		return gatesIn(body)
	}
	note := func(resource string, err error) {
		reason := forbidden
		if !apierrors.IsForbidden(err) {
			reason = err.Error()
		}
		s.Missing = append(s.Missing, Missing{Resource: resource, Reason: reason})
	}
	gates, err := read("/metrics")
	if s.Installation.FeatureGates = gates; err != nil {
		note("/metrics of the API server", err)
	}
	kubelets, last := map[string]map[string]bool{}, error(nil)
	for _, node := range s.oneNodeOfEachVersion() {
		gates, failed := read("/api/v1/nodes/" + node + "/proxy/metrics")
		if failed == nil {
			kubelets[node] = gates
			continue
		}
		if last = fmt.Errorf("node %s: %w", node, failed); apierrors.IsForbidden(failed) {
			break
		}
	}
	if s.Installation.KubeletGates = kubelets; len(kubelets) == 0 && last != nil {
		note("/metrics of kubelets", last)
	}
}

// oneNodeOfEachVersion are nodes with devices, the first one for each version of the kubelet.
func (s *Snapshot) oneNodeOfEachVersion() (nodes []string) {
	with := map[string]bool{}
	for _, slice := range s.ResourceSlices {
		if slice.Spec.NodeName != nil {
			with[*slice.Spec.NodeName] = true
		}
	}
	seen := map[string]bool{}
	for _, node := range s.Nodes {
		version := node.Status.NodeInfo.KubeletVersion
		if with[node.Name] && !seen[version] && len(nodes) < maxKubelets {
			seen[version] = true
			nodes = append(nodes, node.Name)
		}
	}
	return nodes
}

// gatesIn reads `kubernetes_feature_enabled{name="X",stage="BETA"} 1` from metrics in Prometheus's text format. Without any it is an error.
func gatesIn(r io.Reader) (map[string]bool, error) {
	gates := map[string]bool{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), "kubernetes_feature_enabled{")
		if !ok {
			continue
		}
		_, rest, _ = strings.Cut(rest, `name="`)
		name, rest, ok := strings.Cut(rest, `"`)
		_, value, found := strings.Cut(rest, "} ")
		if ok && found {
			gates[name] = strings.TrimSpace(value) == "1"
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(gates) == 0 {
		return nil, errors.New("its metrics have no kubernetes_feature_enabled")
	}
	return gates, nil
}
