"""Settings that a recipe may become, and the changes with which it needs less memory.

Every search for what fits is a question over what is here. A question has

- a *recipe* to start from;
- *knobs that may move*: those with ``search_values``, without what the user keeps (``plan.keep``) or has not
  consented to (``plan.allow``, the ``consent`` of an effect);
- *rules* that must hold: the recipe's own (``recipe/rules``), the device's, and for changes the advice in
  ``remediations.py``;
- an *order* of its candidates;
- *estimates*: above this room, each made once. Bounds exclude without one, and expectations say which comes first.

=====================================  ===================================  =====================  ==================
question                               knobs that may move                  order                  estimates
=====================================  ===================================  =====================  ==================
``planner.plan``                       all                                  seconds of a step      18, then neighbours
``planner.plan_checkpointing``         ``checkpointing``                    seconds of a step      about 10
``estimate --changes``                 leaner values, with what rules ask   price of a change      until 3 changes fit
``rehearse``: a fix                    likewise, exact ones alone           price of a change      likewise
a run out of memory, ``hf.attach``     leaner values, with what rules ask   price of a change      none
a shipped recipe that fits             those of shipped recipes             most memory first      2
=====================================  ===================================  =====================  ==================
"""
