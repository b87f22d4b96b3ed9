// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"sync"

	admissionapi "k8s.io/api/admissionregistration/v1"
	v1 "k8s.io/api/core/v1"
	rbacapi "k8s.io/api/rbac/v1"
	"k8s.io/component-helpers/auth/rbac/validation"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/manifests/base/access"
	"stowage.dev/stowage/pkg/snapshot"
)

// applyAccess is what to do about rights and policies.
const applyAccess = "kubectl apply -k manifests/base/access"

// shipped is what manifests/base/access has.
type shipped struct {
	roles    map[string]*rbacapi.ClusterRole
	policies []*admissionapi.ValidatingAdmissionPolicy
}

// manifests reads the embedded manifests. They are part of the program: an error is one in it.
var manifests = sync.OnceValue(func() shipped {
	s := shipped{roles: map[string]*rbacapi.ClusterRole{}}
	names, err := fs.Glob(access.Files, "*.yaml")
	if err != nil {
		panic(err)
	}
	for _, name := range names {
		content, err := access.Files.ReadFile(name)
		if err != nil {
			panic(err)
		}
		for document := range bytes.SplitSeq(content, []byte("\n---\n")) {
			var kind struct{ Kind string }
			role, policy := &rbacapi.ClusterRole{}, &admissionapi.ValidatingAdmissionPolicy{}
			err := yaml.Unmarshal(document, &kind)
			switch {
			case err == nil && kind.Kind == "ClusterRole":
				err = yaml.UnmarshalStrict(document, role)
				s.roles[role.Name] = role
			case err == nil && kind.Kind == "ValidatingAdmissionPolicy":
				err = yaml.UnmarshalStrict(document, policy)
				s.policies = append(s.policies, policy)
			}
			if err != nil {
				panic(fmt.Sprintf("%s: %v", name, err))
			}
		}
	}
	return s
})

// rulesOf are what an account may do in all namespaces, and in the given one if it is not empty.
func rulesOf(from *snapshot.Installation, namespace, name, in string) (rules []rbacapi.PolicyRule) {
	mine := func(subjects []rbacapi.Subject) bool {
		return slices.ContainsFunc(subjects, func(s rbacapi.Subject) bool { return snapshot.IsAccount(s, namespace, name) })
	}
	add := func(ref rbacapi.RoleRef) {
		for _, role := range from.ClusterRoles {
			if ref.Kind == "ClusterRole" && role.Name == ref.Name {
				rules = append(rules, role.Rules...)
			}
		}
		for _, role := range from.Roles {
			if ref.Kind == "Role" && role.Name == ref.Name && role.Namespace == in {
				rules = append(rules, role.Rules...)
			}
		}
	}
	for _, b := range from.ClusterRoleBindings {
		if mine(b.Subjects) {
			add(b.RoleRef)
		}
	}
	for _, b := range from.RoleBindings {
		if b.Namespace == in && mine(b.Subjects) {
			add(b.RoleRef)
		}
	}
	return rules
}

// compareRights tells which rules of a shipped role an account lacks.
func (c *cluster) compareRights(namespace string, template *v1.PodTemplateSpec, role string) {
	name := account(template)
	has := rulesOf(c.in, namespace, name, "")
	if covered, lacks := validation.Covers(has, manifests().roles[role].Rules); !covered {
		var texts []string
		for i := range lacks {
			texts = append(texts, describeRule(&lacks[i]))
		}
		c.find(Error, "serviceaccount "+namespace+"/"+name,
			applyAccess+"; an account of another name needs a ClusterRoleBinding to "+role+", too.",
			"It lacks %d rights: %s", len(lacks), some(texts))
	}
}

// describeRule is "update resourceclaims.resource.k8s.io/status", of a rule with one of each.
func describeRule(r *rbacapi.PolicyRule) string {
	resource, sub, _ := strings.Cut(strings.Join(r.Resources, ","), "/")
	if group := strings.Join(r.APIGroups, ","); group != "" {
		resource += "." + group
	}
	if sub != "" {
		resource += "/" + sub
	}
	return strings.TrimSpace(strings.Join(r.Verbs, ",") + " " + resource + " " +
		strings.Join(append(r.ResourceNames, r.NonResourceURLs...), ","))
}

func (c *cluster) schedulerRights() {
	for _, s := range c.schedulers {
		if s.ours {
			c.compareRights(s.Namespace, &s.Spec.Template, "stowage-scheduler")
		}
	}
}

func (c *cluster) agentRights() {
	for _, agent := range c.agents {
		c.compareRights(agent.Namespace, &agent.Spec.Template, "stowage-node-agent")
	}
}

func (c *cluster) leaseRights() {
	for _, s := range c.running() {
		election := s.config.LeaderElection
		if !election.LeaderElect || !s.ours {
			continue
		}
		name := account(&s.Spec.Template)
		wanted := []rbacapi.PolicyRule{{
			APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{election.ResourceName},
			Verbs: []string{"get", "update"},
		}}
		if covered, _ := validation.Covers(rulesOf(c.in, s.Namespace, name, election.ResourceNamespace), wanted); !covered {
			c.find(Error, "serviceaccount "+s.Namespace+"/"+name,
				applyAccess+"; with overlays/second-profile, that overlay has the Role in kube-system.",
				"It may not get and update the lease %s/%s: no replica leads", election.ResourceNamespace, election.ResourceName)
		}
	}
}

// accountIn is how an expression names a ServiceAccount.
var accountIn = regexp.MustCompile(`system:serviceaccount:([a-z0-9.-]+):([a-z0-9.-]+)`)

// rules are what a policy refuses, whomever it is about.
func rules(p *admissionapi.ValidatingAdmissionPolicy) string {
	var all []string
	for _, v := range p.Spec.Variables {
		all = append(all, v.Name+": "+v.Expression)
	}
	for _, v := range p.Spec.Validations {
		all = append(all, v.Expression)
	}
	return accountIn.ReplaceAllString(strings.Join(strings.Fields(strings.Join(all, "\n")), " "), "ACCOUNT")
}

// policies compares those of the cluster with the shipped ones.
func (c *cluster) policies() {
	if !c.installed() {
		return
	}
	for _, want := range manifests().policies {
		object := "validatingadmissionpolicy " + want.Name
		i := slices.IndexFunc(c.in.Policies, func(p *admissionapi.ValidatingAdmissionPolicy) bool { return p.Name == want.Name })
		if i < 0 {
			c.find(Error, object, applyAccess, "It is not there: what it keeps off is allowed, and scheduler and agent do not become ready")
			continue
		}
		if rules(c.in.Policies[i]) != rules(want) {
			c.find(Warning, object, applyAccess+", of the version that runs.", "Its rules are not those of this version of kubectl stowage")
		}
		bound, denies := false, false
		for _, b := range c.in.PolicyBindings {
			if b.Spec.PolicyName == want.Name {
				bound = true
				denies = denies || slices.Contains(b.Spec.ValidationActions, admissionapi.Deny)
			}
		}
		switch {
		case !bound:
			c.find(Error, object, applyAccess, "No ValidatingAdmissionPolicyBinding is for it: it has no effect")
		case !denies:
			c.find(Error, object, "Set validationActions: [Deny] in its binding.", "Its binding does not deny: it only warns")
		}
	}
}

// policyAccounts looks whom the policies are about: where scheduler or agent run as another account, what they forbid is allowed.
func (c *cluster) policyAccounts() {
	accounts := map[string][]string{} // by what begins the policies' names
	for _, s := range c.schedulers {
		if s.ours {
			accounts["stowage-scheduler-"] = append(accounts["stowage-scheduler-"],
				"system:serviceaccount:"+s.Namespace+":"+account(&s.Spec.Template))
		}
	}
	for _, agent := range c.agents {
		accounts["stowage-node-agent-"] = append(accounts["stowage-node-agent-"],
			"system:serviceaccount:"+agent.Namespace+":"+account(&agent.Spec.Template))
	}
	for _, p := range c.in.Policies {
		var about []string
		for _, condition := range p.Spec.MatchConditions {
			about = append(about, accountIn.FindAllString(condition.Expression, -1)...)
		}
		for _, prefix := range sortedKeys(accounts) {
			for _, account := range slices.Compact(slices.Sorted(slices.Values(accounts[prefix]))) {
				if strings.HasPrefix(p.Name, prefix) && !slices.Contains(about, account) {
					c.find(Error, "validatingadmissionpolicy "+p.Name, "Name the account in the policy's matchConditions.",
						"It is about %s, and the account is %s: the policy does not hold for it", some(about), account)
				}
			}
		}
	}
}

// agentNamespace looks at pod security: an agent for real GPUs is privileged.
func (c *cluster) agentNamespace() {
	const label = "pod-security.kubernetes.io/enforce"
	for _, agent := range c.agents {
		for _, ns := range c.s.Namespaces {
			if level := ns.Labels[label]; ns.Name == agent.Namespace && level != "" && level != "privileged" {
				c.find(Error, "namespace "+ns.Name, "kubectl label namespace "+ns.Name+" --overwrite "+label+"=privileged",
					"Its label %s is %s: pods of %s are refused", label, level, daemonSetName(agent))
			}
		}
	}
}
